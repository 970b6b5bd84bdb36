// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "array_argument.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/operand.h"

namespace xpuruntime::bindings {

/// Runs one checked call on arrays of Python: settles the stream, makes the outputs that were not
/// given, orders the work of several libraries, and hands the results over. Call with the GIL; it
/// is released while the kernel is chosen and launched.
///
/// `inputs`: the first that is given decides what kind of arrays come back. `outputs`: for the
/// first outputs of the call, None where a new array is to be made, as it is for those that are
/// not listed. Returns the array, or a tuple of them where `call` has several outputs.
pybind11::object run_call(CallSite& site, OpCall& call, std::span<const ArrayArgument> inputs,
                          std::initializer_list<PyObject*> outputs, PyObject* stream);

/// Where a call stands, and what its policy says beyond kernels.
struct CallPlace {
  CallSite& site;
  bool allow_tf32 = false;
  bool deterministic = false;
};

/// The positional arguments of a function of CPython's own calling convention, which is what makes
/// operations cheap to call. The Python functions of xpuruntime.ops are the only callers. Each
/// `next` throws InputError, which names the argument, for a value that is none.
class PositionalArguments {
 public:
  PositionalArguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected,
                      const char* function);

  PyObject* next() { return values_[at_++]; }
  /// The next arguments as arrays of these names, in this order.
  template <std::size_t kCount>
  std::array<ArrayArgument, kCount> next_arrays(const char* const (&names)[kCount]) {
    return arrays_of(names, std::make_index_sequence<kCount>());
  }
  /// A Place of xpuruntime.ops.ambient, which begins with these three. Where its last says that
  /// autograd is above the call, arrays that require a gradient are taken from here on.
  CallPlace next_place();
  /// By Python's own idea of truth.
  bool next_flag();
  double next_number(const char* name);
  std::optional<double> next_optional_number(const char* name);
  Activation next_activation();
  std::optional<DType> next_dtype();
  Phase next_phase();
  Causal next_causal();
  template <std::size_t kCount>
  std::array<std::int32_t, kCount> next_integers(const char* name) {
    std::array<std::int32_t, kCount> values{};
    read_integers(values, name);
    return values;
  }

 private:
  template <std::size_t kCount, std::size_t... kAt>
  std::array<ArrayArgument, kCount> arrays_of(const char* const (&names)[kCount],
                                              std::index_sequence<kAt...> /*each*/) {
    return {ArrayArgument(next(), names[kAt], below_autograd_)...};
  }
  void read_integers(std::span<std::int32_t> values, const char* name);

  PyObject* const* values_;
  std::size_t at_ = 0;
  bool below_autograd_ = false;
};

}  // namespace xpuruntime::bindings

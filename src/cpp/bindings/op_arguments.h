// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "array_argument.h"
#include "call_context.h"
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

/// Throws TypeError, which lists the parameters.
[[noreturn]] void refuse_count(const char* function, Py_ssize_t given,
                               std::span<const char* const> parameters);

/// The value of one argument as what it is in C++. Each throws InputError, which names the
/// argument, for a value that is none.
namespace argument {
/// By Python's own idea of truth.
bool flag(PyObject* value);
double number(PyObject* value, const char* name);
std::optional<double> optional_number(PyObject* value, const char* name);
Activation activation(PyObject* value);
std::optional<DType> out_dtype(PyObject* value);
Phase phase(PyObject* value);
Causal causal(PyObject* value);
void integers(PyObject* value, std::span<std::int32_t> into, const char* name);
}  // namespace argument

/// The name of a parameter, as a template argument.
template <std::size_t kSize>
struct ParameterName {
  // NOLINTNEXTLINE(google-explicit-constructor): written as a literal
  consteval ParameterName(const char (&from)[kSize]) { std::copy_n(from, kSize, text); }
  char text[kSize];
};

/// The arguments of a function of CPython's own calling convention (METH_FASTCALL), which is what
/// makes operations cheap to call. `kParameters` lists the names of its parameters in their order,
/// and is the only place that knows the order: arguments are read by name, and a name that the list
/// has not does not compile. The first is the CallContext.
template <const auto& kParameters>
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count, const char* function) : values_(values) {
    if (count != static_cast<Py_ssize_t>(kParameters.size())) {
      refuse_count(function, count, kParameters);
    }
    context_ = &call_context(values[0]);
  }

  /// Valid until other Python code runs.
  const CallContext& context() const noexcept { return *context_; }
  template <ParameterName kName>
  PyObject* object() const noexcept {
    return values_[place<kName>()];
  }
  template <ParameterName... kNames>
  std::array<ArrayArgument, sizeof...(kNames)> arrays() const {
    const bool below_autograd = context_->below_autograd;
    return {ArrayArgument(object<kNames>(), kNames.text, below_autograd)...};
  }
  template <ParameterName kName>
  bool flag() const {
    return argument::flag(object<kName>());
  }
  template <ParameterName kName>
  double number() const {
    return argument::number(object<kName>(), kName.text);
  }
  template <ParameterName kName>
  std::optional<double> optional_number() const {
    return argument::optional_number(object<kName>(), kName.text);
  }
  template <ParameterName kName, std::size_t kCount>
  std::array<std::int32_t, kCount> integers() const {
    std::array<std::int32_t, kCount> values{};
    argument::integers(object<kName>(), values, kName.text);
    return values;
  }

 private:
  template <ParameterName kName>
  static consteval std::size_t place() {
    for (std::size_t at = 0; at < kParameters.size(); ++at) {
      if (std::string_view(kParameters[at]) == kName.text) return at;
    }
    throw std::invalid_argument("the function has no parameter of this name");
  }

  PyObject* const* values_;
  const CallContext* context_ = nullptr;
};

}  // namespace xpuruntime::bindings

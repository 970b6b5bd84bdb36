// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "convert.h"
#include "exchange.h"
#include "xpuruntime/operand.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/tensor.h"

namespace xpuruntime::bindings {

/// One array argument of an operation, of whatever library, seen as an Operand. Valid for as long
/// as the Python object is; call with the GIL.
class ArrayArgument {
 public:
  /// Where the array comes from, which is where results go.
  enum class Kind : std::uint8_t { kTable, kNumpy, kTensor, kOther };

  /// None is an argument that was left out. Throws InputError for what is no array that can be
  /// shared, and UnsupportedOperationError for a tensor whose gradient, or whose minus, would be
  /// lost; both name the argument. With `below_autograd` its library has seen to both already.
  ArrayArgument(PyObject* object, const char* name, bool below_autograd = false);

  const Operand& operand() const noexcept { return operand_; }
  bool given() const noexcept { return !operand_.absent; }
  Kind kind() const noexcept { return kind_; }
  /// Whether both are of one library with a table of C functions, so of one current stream.
  bool same_library(const ArrayArgument& other) const noexcept {
    return api_ != nullptr && api_ == other.api_;
  }

  /// On CUDA, the stream that its library works on now: the default stream where that cannot be
  /// asked. Nothing for xpuruntime's own tensors, which know by themselves when they are ready.
  std::optional<StreamHandle> current_stream() const;
  /// Work on `stream` from here on sees what was written before.
  void order_before(const Stream& stream) const;
  /// Called after work that reads (or with `written` writes) it was given to `stream`.
  void order_after(const Stream& stream, bool written) const;

  /// A new array of the same library, or a Tensor where its library has to be asked, for use in the
  /// order of `stream`; `view` is what it looks like.
  pybind11::object make_like(const OutputSpec& spec, const std::optional<Stream>& stream,
                             Operand& view) const;
  /// Called after work that writes an array of `make_like` was given to `stream`.
  void order_made(const pybind11::object& made, const Stream& stream) const;
  /// What the caller gets: `made` itself, or where its library has to be asked, its array on the
  /// same memory.
  pybind11::object hand_over(pybind11::object made) const;

 private:
  void take_table(Exchange exchange, bool below_autograd);
  void take_tensor(const Tensor& tensor);
  void import_other();
  pybind11::object make_by_torch(const OutputSpec& spec, Operand& view) const;
  pybind11::object make_by_table(const OutputSpec& spec, Operand& view) const;

  Operand operand_;
  Kind kind_ = Kind::kTensor;
  PyObject* object_ = nullptr;
  const DLPackExchangeAPI* api_ = nullptr;
  StreamHandle current_ = 0;        // kOther: what its library works on
  const Tensor* tensor_ = nullptr;  // all but kTable
  std::optional<Tensor> imported_;  // kNumpy, kOther
};

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// The operands of a matrix product, as PyTorch has them.
struct ProductTensors {
  TorchTensor c = nullptr;  ///< what is added, if anything
  TorchTensor a = nullptr;
  TorchTensor b = nullptr;
  TorchTensor out = nullptr;  ///< where the result goes, if it is given
};

/// Before a matrix product whose native kernel PyTorch has a C function for: calls that one where
/// the route of the call is known and native, without Python, and asks Python otherwise.
class DirectGate {
 public:
  /// `kernel`: PyTorch's C function for the product into a tensor. `keyset`: what the native kernel
  /// is called with by way of Python.
  DirectGate(pybind11::str name, pybind11::object slow, pybind11::object native,
             pybind11::object keyset, void* kernel, bool adds, bool into);

  /// Stands before the operator anew. With the GIL.
  void renew(pybind11::object slow, pybind11::object native);
  bool adds() const noexcept { return adds_; }
  bool into() const noexcept { return into_; }

  /// Does the product by PyTorch's function. False, with nothing done, where that refuses. `made`
  /// is the caller's to drop; untouched where `out` is given. Needs no GIL.
  bool run_native(const ProductTensors& tensors, TorchTensor* made) const noexcept;
  /// Whether the arrays say that it is known. Needs no GIL.
  bool knows(const ProductTensors& tensors) const noexcept;
  /// As `run_native`, of a call with `out` as given or null. With the GIL, which others may have
  /// meanwhile; null with no error set where nothing is done.
  PyObject* native_object(const ProductTensors& tensors, PyObject* out) const;

  /// Does the call by way of Python, and takes note where it was native. `values` without a keyset,
  /// `names` as of a vectorcall. With the GIL; null with an error set. Throws
  /// py::error_already_set.
  PyObject* ask(PyObject* const* values, Py_ssize_t count, PyObject* names);

  /// The operands of such a call; false where they are others than the operator has.
  bool take(PyObject* const* values, Py_ssize_t count, PyObject* names,
            ProductTensors& tensors) const noexcept;

 private:
  /// By a kernel of ours; null with no error set where Python has to look at the call.
  PyObject* run_ours(PyObject* place, PyObject* const* values, Py_ssize_t count,
                     PyObject* names) const;
  bool looks_made(PyObject* result, const ProductTensors& tensors) const noexcept;

  pybind11::str name_;
  pybind11::object slow_;
  pybind11::object native_;
  pybind11::object keyset_;
  void* kernel_;
  bool adds_;
  bool into_;
  std::atomic<std::uint64_t> number_;
};

}  // namespace xpuruntime::bindings

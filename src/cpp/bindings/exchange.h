// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <dlpack/dlpack.h>
#include <pybind11/numpy.h>

#include <string>

#include "xpuruntime/tensor.h"

namespace xpuruntime::bindings {

/// What a type says once about DLPack's table of C functions.
struct Exchange {
  PyTypeObject* type = nullptr;
  const DLPackExchangeAPI* api = nullptr;
  bool has_gradients = false;
  bool has_negation = false;  ///< whether it may have yet to negate what is in memory, as PyTorch
};

/// The table of a type, or nothing where it has none. The result is valid until the next call; the
/// `api` in it for as long as the process lives.
const Exchange* find_exchange(PyTypeObject* type);

/// Throws UnsupportedOperationError, with `what` in front, where an object of a type that
/// has_negation has yet to negate the numbers in its memory: no protocol of DLPack carries that.
/// May run Python.
void refuse_negation(pybind11::handle object, const std::string& what);

/// A tensor on the memory of any DLPack array, or of a capsule. `stream` as for
/// Tensor.from_dlpack.
Tensor import_object(pybind11::handle object, pybind11::handle stream);

/// A tensor on the memory of a numpy.ndarray. Throws InputError for anything else.
Tensor import_numpy(const pybind11::object& object);
/// NumPy's name for the type. Throws UnsupportedOperationError where it has none and ml_dtypes is
/// not installed.
pybind11::dtype to_numpy_dtype(DType dtype);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "xpuruntime/buffer.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime::bindings {

// Buffer and MemoryPool are plain CPython types, not pybind11 classes: allocating and freeing is
// the one thing that Python does often enough for the difference to count. All functions here need
// the GIL.

/// Adds the types. Called once, before anything below.
void add_buffer_type(pybind11::module_& module);
void add_pool_type(pybind11::module_& module);

/// A new Python object that owns the buffer. Throws pybind11::error_already_set.
pybind11::object to_python(Buffer buffer);
pybind11::object to_python(std::shared_ptr<MemoryPool> pool);
/// The same without pybind11: a new reference, or nullptr with the error set.
PyObject* new_buffer(Buffer buffer) noexcept;

/// The pool of a Python MemoryPool. Throws InputError for anything else.
std::shared_ptr<MemoryPool> to_pool(pybind11::handle object);
/// The handle of None (0), an integer, or a stream object: one with `__cuda_stream__`, or of
/// PyTorch or CuPy. Throws InputError for anything else.
StreamHandle to_stream(PyObject* object);

}  // namespace xpuruntime::bindings

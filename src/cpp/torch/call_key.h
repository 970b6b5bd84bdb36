// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

namespace xpuruntime::bindings {

/// Everything that a kernel depends on of a call's arrays, behind a name, as bytes; `last` may be
/// nullptr. None where an array cannot be seen. Throws py::error_already_set.
pybind11::object call_key_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count,
                             PyObject* last = nullptr);

/// What is left of a call of attention (query, key, value, and a mask or None) without its lengths,
/// behind a name, as bytes; None where they count. A kernel that serves one call of a kind may
/// refuse another. Throws py::error_already_set.
pybind11::object attention_kind_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

namespace xpuruntime::bindings {

/// Everything that a kernel depends on of a call's arrays, behind a name, as bytes; `last` may be
/// nullptr. None where an array cannot be seen. Throws py::error_already_set.
pybind11::object call_key_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count,
                             PyObject* last = nullptr);

}  // namespace xpuruntime::bindings

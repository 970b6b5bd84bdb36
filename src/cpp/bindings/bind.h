// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

namespace xpuruntime::bindings {

// One function a noun. Each adds its classes and functions to the module and decides nothing.

/// C++ errors become the classes of xpuruntime.errors. Called first.
void bind_errors();
void bind_build(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_stream(pybind11::module_& module);
void bind_tensor(pybind11::module_& module);

/// For code outside pybind11's dispatch: call inside `catch (...)`; sets the Python error.
void set_python_error() noexcept;

}  // namespace xpuruntime::bindings

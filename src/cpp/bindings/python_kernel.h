// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include "xpuruntime/kernel_registry.h"

namespace xpuruntime::bindings {

/// Registers kernels that Python objects define, all or none; _core.pyi describes them
/// (PythonBackend, PythonKernel). They are kept for as long as the definition is, and called with
/// the GIL from whatever thread asks. Throws InputError for an object that lacks something, and as
/// KernelRegistry::add_all does; a backend is the same where it is the same object.
///
/// An exception of theirs becomes the C++ error of the same meaning, or goes on as it is; one that
/// is no `Exception` of Python becomes an Interruption.
void register_python_kernels(KernelRegistry& registry, const pybind11::object& backend,
                             const pybind11::args& kernels);

}  // namespace xpuruntime::bindings

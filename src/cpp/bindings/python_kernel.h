// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/tuning_store.h"

namespace xpuruntime::bindings {

/// A kernel that Python objects define; _core.pyi describes them (PythonBackend, PythonKernel).
/// They are kept for as long as the definition is, and called with the GIL from whatever thread
/// asks. Throws InputError for an object that lacks something.
KernelRegistry::Definition make_python_kernel(const pybind11::object& backend,
                                              const pybind11::object& definition);

/// A store that a Python object keeps (`find` and `put`). What the object raises becomes a note.
std::shared_ptr<TuningStore> make_python_store(const pybind11::object& store);

}  // namespace xpuruntime::bindings

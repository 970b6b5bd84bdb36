// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// Puts a kernel in C in an operator's place. Returns what takes it away again when it is called,
/// or None where PyTorch refuses it. With the GIL.
pybind11::object open_torch_library(const char* space, const std::string& key,
                                    const std::string& name, TorchKernel kernel);

}  // namespace xpuruntime::bindings

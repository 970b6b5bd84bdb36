// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>
#include <vector>

namespace xpuruntime {

class KernelRegistry;

/// Registers the kernels of a shared library that exports `xpuruntime_kernels`; its contract is
/// kernel_plugin.h. The library is never closed. Returns the ids.
///
/// Throws InputError when the file cannot be opened, exports no such function, speaks another
/// version, or describes a kernel that makes no sense, one that is registered already, or a backend
/// whose name is taken; then none of its kernels is registered, and the library is closed.
std::vector<std::string> register_plugin_library(KernelRegistry& registry, const std::string& path);

}  // namespace xpuruntime

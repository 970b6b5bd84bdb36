// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <map>
#include <string>
#include <vector>

namespace xpuruntime {

class KernelRegistry;

/// Registers the kernels of a shared library that exports `xpuruntime_kernels`; its contract is
/// kernel_plugin.h, in its version 2 or 1. The library is never closed. Returns the ids. `families`
/// are the words that policies know for an operation, by its name; those of others are not checked.
///
/// Throws InputError when the file cannot be opened, exports no such function, speaks another
/// version, or describes a kernel that makes no sense, one that is registered already, one of an
/// unknown family, or a backend whose name is taken; then none of its kernels is registered, and
/// the library is closed.
std::vector<std::string> register_plugin_library(
    KernelRegistry& registry, const std::string& path,
    const std::map<std::string, std::vector<std::string>>& families);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "xpuruntime/kernel.h"
#include "xpuruntime/kernel_plugin.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {

/// One kernel of a library: its fields, zero where the library's header has fewer, and the version
/// of the descriptions that its functions read.
struct PluginEntry {
  XpuKernel kernel{};
  std::uint32_t abi = XPURUNTIME_KERNEL_ABI;
};

/// The backend of all kernels of a library, of which `first` is one.
std::shared_ptr<const KernelBackend> plugin_backend(std::string name, DeviceType type,
                                                    const XpuKernel& first);

/// A kernel of a library. The library must stay open as long as it, and all that it prepares, live.
KernelRegistry::Definition plugin_definition(const PluginEntry& entry,
                                             std::shared_ptr<const KernelBackend> backend);

}  // namespace xpuruntime

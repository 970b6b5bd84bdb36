// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/runtime.h"

#include "xpuruntime/device_manager.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/stream_manager.h"

namespace xpuruntime {

Runtime::Runtime()
    : devices_(std::make_unique<DeviceManager>()),
      memory_(std::make_unique<MemoryManager>()),
      streams_(std::make_unique<StreamManager>()),
      kernels_(std::make_unique<KernelRegistry>()),
      dispatcher_(std::make_unique<Dispatcher>(*kernels_, *devices_, *memory_)) {}

Runtime::~Runtime() = default;

Runtime& Runtime::instance() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

}  // namespace xpuruntime

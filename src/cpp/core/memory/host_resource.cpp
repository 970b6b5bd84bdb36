// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstdlib>
#include <new>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/memory_resource.h"

namespace xpuruntime {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostResource final : public MemoryResource {
 public:
  DeviceId device() const noexcept override { return {DeviceType::kCpu, 0}; }
  bool host_accessible() const noexcept override { return true; }

  void* allocate(std::size_t bytes, StreamHandle /*stream*/) override {
    return ::operator new(bytes, kAlignment, std::nothrow);
  }

  void deallocate(void* pointer, std::size_t /*bytes*/, StreamHandle /*stream*/) noexcept override {
    ::operator delete(pointer, kAlignment);
  }

  MemoryInfo memory_info() noexcept override {
    try {
      return DeviceManager::instance().memory_info(device());
    } catch (...) {
      return {};
    }
  }
};

}  // namespace

std::unique_ptr<MemoryResource> make_host_resource() { return std::make_unique<HostResource>(); }

}  // namespace xpuruntime

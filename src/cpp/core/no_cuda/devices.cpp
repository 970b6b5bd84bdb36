// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_api.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_resource.h"

namespace xpuruntime {
namespace {

constexpr const char* kReason =
    "this build of xpuruntime has no CUDA core: build it again with nvcc on PATH";

[[noreturn]] void refuse(const char* what, int device) {
  throw UnsupportedOperationError(std::string(what) + " needs a CUDA device, and " + kReason,
                                  "cuda:" + std::to_string(device));
}

}  // namespace

namespace cuda {

bool built() noexcept { return false; }

std::vector<DeviceInfo> enumerate(std::string& reason) {
  reason = kReason;
  return {};
}

MemoryInfo memory_info(int device) { refuse("memory_info", device); }
int current_device() { refuse("current_device", 0); }
void set_current_device(int device) { refuse("set_current_device", device); }
void synchronize(int device) { refuse("synchronize", device); }
std::shared_ptr<void> enter_device(int device) { refuse("enter_device", device); }
void launch_kernel(int device, const Kernel&, void* const*, void*, StreamHandle) {
  refuse("launching a kernel", device);
}
void outside_capture(int, const std::function<void()>& body) { body(); }
std::size_t cache_bytes(int device) { refuse("cache_bytes", device); }
void copy_strided(int device, const void*, void*, int, const std::int64_t*, const std::int64_t*,
                  std::size_t, StreamHandle) {
  refuse("copy_to_contiguous", device);
}

}  // namespace cuda

std::unique_ptr<MemoryResource> make_device_resource(int device) {
  refuse("device memory", device);
}
std::unique_ptr<MemoryResource> make_driver_resource(int device) {
  refuse("the driver's memory pool", device);
}
std::unique_ptr<MemoryResource> make_pinned_resource(int device) {
  refuse("pinned memory", device);
}

}  // namespace xpuruntime

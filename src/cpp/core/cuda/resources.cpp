// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/capture.h"
#include "cuda/check.h"
#include "cuda/stream_order.h"
#include "cuda_api.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/memory_resource.h"

namespace xpuruntime {
namespace cuda {
namespace {

class CudaResource : public MemoryResource {
 public:
  explicit CudaResource(int device) : device_(device), order_(device) {
    DeviceManager::instance().require(CudaResource::device());
  }
  DeviceId device() const noexcept final { return {DeviceType::kCuda, device_}; }
  StreamOrder* order() noexcept final { return &order_; }
  bool host_accessible() const noexcept override { return false; }
  MemoryInfo memory_info() noexcept override {
    try {
      return cuda::memory_info(device_);
    } catch (...) {
      return {};
    }
  }

 protected:
  // nullptr for exhausted memory, as MemoryResource asks; other failures throw.
  void* result(void* pointer, cudaError_t status, const char* call) const {
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    check(status, call, device_);
    return pointer;
  }

  // A failure while freeing cannot be reported to anyone; it stays out of later calls.
  static void ignore(cudaError_t status) noexcept {
    if (status != cudaSuccess) (void)cudaGetLastError();
  }

  const int device_;

 private:
  CudaStreamOrder order_;
};

class DeviceResource final : public CudaResource {
 public:
  using CudaResource::CudaResource;

  void* allocate(std::size_t bytes, StreamHandle /*stream*/) override {
    const DeviceGuard guard(device_);
    const OutsideCapture outside;
    void* pointer = nullptr;
    const cudaError_t status = cudaMalloc(&pointer, bytes);
    return result(pointer, status, "cudaMalloc");
  }

  void deallocate(void* pointer, std::size_t /*bytes*/, StreamHandle /*stream*/) noexcept override {
    const DeviceGuard guard(device_, std::nothrow);
    const OutsideCapture outside;
    ignore(cudaFree(pointer));
  }
};

class PinnedResource final : public CudaResource {
 public:
  using CudaResource::CudaResource;
  bool host_accessible() const noexcept override { return true; }
  MemoryInfo memory_info() noexcept override {
    try {
      return DeviceManager::instance().memory_info({DeviceType::kCpu, 0});
    } catch (...) {
      return {};
    }
  }

  void* allocate(std::size_t bytes, StreamHandle /*stream*/) override {
    const DeviceGuard guard(device_);
    const OutsideCapture outside;
    void* pointer = nullptr;
    const cudaError_t status = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable);
    return result(pointer, status, "cudaHostAlloc");
  }

  void deallocate(void* pointer, std::size_t /*bytes*/, StreamHandle /*stream*/) noexcept override {
    const DeviceGuard guard(device_, std::nothrow);
    const OutsideCapture outside;
    ignore(cudaFreeHost(pointer));
  }
};

class DriverResource final : public CudaResource {
 public:
  explicit DriverResource(int device) : CudaResource(device) {
    const DeviceGuard guard(device);
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate", device);
    // Freed memory stays until it is trimmed; otherwise every synchronisation would give it back.
    std::uint64_t keep = UINT64_MAX;
    const cudaError_t status =
        cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep);
    if (status != cudaSuccess) ignore(cudaMemPoolDestroy(pool_));
    check(status, "cudaMemPoolSetAttribute", device);
  }

  ~DriverResource() override {
    const DeviceGuard guard(device_, std::nothrow);
    ignore(cudaMemPoolDestroy(pool_));
  }

  void* allocate(std::size_t bytes, StreamHandle stream) override {
    const DeviceGuard guard(device_);
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocFromPoolAsync(&pointer, bytes, pool_, as_stream(stream));
    return result(pointer, status, "cudaMallocFromPoolAsync");
  }

  void deallocate(void* pointer, std::size_t /*bytes*/, StreamHandle stream) noexcept override {
    try {
      const DeviceGuard guard(device_);
      ignore(cudaFreeAsync(pointer, as_stream(stream)));
    } catch (...) {
      // Without its device there is nothing left to free.
    }
  }

  std::size_t held() noexcept override {
    const DeviceGuard guard(device_, std::nothrow);
    std::uint64_t bytes = 0;
    ignore(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &bytes));
    return bytes;
  }

  void trim(std::size_t keep) noexcept override {
    const DeviceGuard guard(device_, std::nothrow);
    ignore(cudaMemPoolTrimTo(pool_, keep));
  }

 private:
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<MemoryResource> make_device_resource(int device) {
  return std::make_unique<cuda::DeviceResource>(device);
}

std::unique_ptr<MemoryResource> make_driver_resource(int device) {
  return std::make_unique<cuda::DriverResource>(device);
}

std::unique_ptr<MemoryResource> make_pinned_resource(int device) {
  return std::make_unique<cuda::PinnedResource>(device);
}

}  // namespace xpuruntime

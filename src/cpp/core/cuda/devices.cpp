// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "cuda/capture.h"
#include "cuda/check.h"
#include "cuda_api.h"

namespace xpuruntime::cuda {
namespace {

std::pair<int, int> version_pair(int version) { return {version / 1000, version % 1000 / 10}; }

std::string text(std::pair<int, int> version) {
  return std::to_string(version.first) + "." + std::to_string(version.second);
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string explain(cudaError_t status) {
  const int driver = driver_version();
  if (driver == 0) {
    return "no NVIDIA driver was found (libcuda.so.1). Fix: install the driver, or in a container "
           "start it with GPU access";
  }
  if (status == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver serves CUDA up to " + text(version_pair(driver)) +
           ", and this build needs CUDA " + text(version_pair(CUDART_VERSION)) +
           ". Fix: install a newer driver";
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible != nullptr) {
      return "the NVIDIA driver shows no device, and CUDA_VISIBLE_DEVICES is '" +
             std::string(visible) + "'. Fix: unset it, or name a device that exists";
    }
    return "the NVIDIA driver is there, but shows no device. Fix: see what nvidia-smi lists";
  }
  return std::string("the CUDA runtime does not start: ") + cudaGetErrorString(status) + " (" +
         cudaGetErrorName(status) + "). Fix: see what nvidia-smi says";
}

std::vector<std::string> supported_dtypes(int major, int minor) {
  const int capability = major * 10 + minor;
  std::vector<std::string> dtypes{"fp64", "fp32"};
  if (capability >= 53) dtypes.emplace_back("fp16");
  if (capability >= 61) dtypes.emplace_back("int8");
  if (capability >= 75 && capability < 90) dtypes.emplace_back("int4");
  if (capability >= 80) {
    dtypes.emplace_back("bf16");
    dtypes.emplace_back("tf32");
  }
  if (capability >= 89) dtypes.emplace_back("fp8_e4m3");
  return dtypes;
}

}  // namespace

bool built() noexcept { return true; }

std::vector<DeviceInfo> enumerate(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    reason = explain(status);
    return {};
  }
  std::vector<DeviceInfo> devices;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties", index);
    DeviceInfo info;
    info.id = {DeviceType::kCuda, index};
    info.name = properties.name;
    info.total_memory = properties.totalGlobalMem;
    info.dtypes = supported_dtypes(properties.major, properties.minor);
    info.compute_capability = {properties.major, properties.minor};
    info.sm_count = properties.multiProcessorCount;
    info.driver_version = version_pair(driver_version());
    info.runtime_version = version_pair(CUDART_VERSION);
    char pci[32] = {};
    check(cudaDeviceGetPCIBusId(pci, sizeof pci, index), "cudaDeviceGetPCIBusId", index);
    info.pci_id = pci;
    devices.push_back(std::move(info));
  }
  return devices;
}

MemoryInfo memory_info(int device) {
  const DeviceGuard guard(device);
  MemoryInfo info;
  check(cudaMemGetInfo(&info.free, &info.total), "cudaMemGetInfo", device);
  return info;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", 0);
  return device;
}

void set_current_device(int device) { check(cudaSetDevice(device), "cudaSetDevice", device); }

std::shared_ptr<void> enter_device(int device) {
  struct Scope {
    explicit Scope(int wanted) : previous(current_device()), guard(std::in_place, wanted) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      guard.reset();
      int current = 0;
      if (cudaGetDevice(&current) == cudaSuccess && current != previous) {
        (void)cudaSetDevice(previous);
      }
    }
    const int previous;
    std::optional<DeviceGuard> guard;
  };
  return std::make_shared<Scope>(device);
}

void synchronize(int device) {
  const DeviceGuard guard(device);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", device);
}

void launch_kernel(int device, const Kernel& kernel, void* const* operands, void* workspace,
                   StreamHandle stream) {
  const DeviceGuard guard(device);
  kernel.launch(operands, workspace, stream);
}

void outside_capture(int device, const std::function<void()>& body) {
  const DeviceGuard guard(device);
  const OutsideCapture outside;
  body();
}

std::size_t cache_bytes(int device) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute",
        device);
  return static_cast<std::size_t>(bytes);
}

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda/check.h"

#include <cuda.h>

#include <mutex>
#include <unordered_map>

#include "cuda/driver_function.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cuda {
namespace {

struct Driver {
  CUresult (*retain)(CUcontext*, CUdevice) =
      driver_function<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  CUresult (*push)(CUcontext) = driver_function<CUresult(CUcontext)>("cuCtxPushCurrent");
  CUresult (*pop)(CUcontext*) = driver_function<CUresult(CUcontext*)>("cuCtxPopCurrent");
};

const Driver& driver() {
  static const Driver calls;
  return calls;
}

void check_driver(CUresult status, const char* call, int device) {
  if (status == CUDA_SUCCESS) return;
  throw CudaError(std::string(call) + " failed on cuda:" + std::to_string(device) + " (" +
                      std::to_string(static_cast<int>(status)) + ")",
                  "cuda:" + std::to_string(device), static_cast<int>(status));
}

// Retained for the life of the process, as the runtime does.
CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, CUcontext> contexts;
  const std::lock_guard lock(mutex);
  CUcontext& context = contexts[device];
  if (context == nullptr) {
    check_driver(driver().retain(&context, device), "cuDevicePrimaryCtxRetain", device);
  }
  return context;
}

}  // namespace

void check(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw CudaError(std::string(call) + " failed on cuda:" + std::to_string(device) + ": " +
                      cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")",
                  "cuda:" + std::to_string(device), static_cast<int>(status));
}

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  int device = 0;
  (void)cudaGetDevice(&device);
  check(status, call, device);
}

DeviceGuard::DeviceGuard(int device) { enter(device); }

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept {
  try {
    enter(device);
  } catch (...) {
    // What follows says for itself that the device is gone.
  }
}

void DeviceGuard::enter(int device) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice", device);
  if (current == device) {
    // The runtime binds the context of a thread with its first launch; calls of the driver, such as
    // those that encode tensor maps, need it before.
    thread_local bool bound = false;
    if (!bound) check(cudaSetDevice(device), "cudaSetDevice", device);
    bound = true;
    return;
  }
  check_driver(driver().push(primary_context(device)), "cuCtxPushCurrent", device);
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) (void)driver().pop(&popped);
}

}  // namespace xpuruntime::cuda

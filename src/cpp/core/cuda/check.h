// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <new>
#include <string>

#include "xpuruntime/types.h"

namespace xpuruntime::cuda {

/// Throws CudaError naming the call, the device, CUDA's own text and the status. Clears a
/// non-sticky error first.
void check(cudaError_t status, const char* call, int device);

/// The same for a call on the current device.
void check(cudaError_t status, const char* call);

/// Makes `device` current for one scope and restores the caller's device. When the device is
/// current already, nothing is called, but for a thread's first time, which binds its context.
/// Otherwise its primary context is pushed on the driver's stack and popped again: `cudaSetDevice`
/// would also create a context on the device that it restores. The destructor never throws.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  /// Leaves the current device as it is where the other cannot be reached.
  DeviceGuard(int device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void enter(int device);
  bool pushed_ = false;
};

inline cudaStream_t as_stream(StreamHandle stream) noexcept {
  return reinterpret_cast<cudaStream_t>(stream);
}

}  // namespace xpuruntime::cuda

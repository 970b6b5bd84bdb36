// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "xpuruntime/types.h"

namespace xpuruntime::cuda {

/// Throws CudaError naming the call, the device, CUDA's own text and the status. Clears a
/// non-sticky error first.
void check(cudaError_t status, const char* call, int device);

/// Makes `device` current for one scope and restores the caller's device. Creates no context where
/// none is needed: when the device is current already, nothing is called. The destructor never
/// throws.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

inline cudaStream_t as_stream(StreamHandle stream) noexcept {
  return reinterpret_cast<cudaStream_t>(stream);
}

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda/check.h"

#include "xpuruntime/error.h"

namespace xpuruntime::cuda {

void check(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw CudaError(std::string(call) + " failed on cuda:" + std::to_string(device) + ": " +
                      cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")",
                  "cuda:" + std::to_string(device), static_cast<int>(status));
}

DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice", device);
  if (current == device) return;
  check(cudaSetDevice(device), "cudaSetDevice", device);
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda/driver_function.h"

#include <cuda_runtime_api.h>

#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime::cuda {

void* driver_address(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  constexpr unsigned int kVersion = 12000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || found == nullptr) {
    (void)cudaGetLastError();
    throw CudaError(std::string("the NVIDIA driver has no ") + name +
                        ": install a driver that is not older than the CUDA runtime",
                    "cuda", static_cast<int>(status));
  }
  return found;
}

}  // namespace xpuruntime::cuda

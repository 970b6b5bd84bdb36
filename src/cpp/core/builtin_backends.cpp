// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <string>
#include <string_view>

#include "cpu/register.h"
#include "null/register.h"
#include "xpuruntime/kernel_registry.h"
#if defined(XPURUNTIME_WITH_CUDA)
#include "cuda_raw/register.h"
#endif
#if defined(XPURUNTIME_WITH_CUBLAS)
#include "cublas/register.h"
#endif
#if defined(XPURUNTIME_WITH_CUDNN)
#include "cudnn/register.h"
#endif

namespace xpuruntime {

// In the order in which `first_supported` tries them. Our own kernels come first: they favour the
// shapes that they are made for, and leave others to the libraries.
void register_builtin_backends(KernelRegistry& registry) {
#if defined(XPURUNTIME_WITH_CUDA)
  register_cuda_raw(registry);
#endif
#if defined(XPURUNTIME_WITH_CUDNN)
  register_cudnn(registry);
#endif
#if defined(XPURUNTIME_WITH_CUBLAS)
  register_cublas(registry);
#endif
  register_cpu(registry);
  register_null(registry);
}

std::string why_not_built([[maybe_unused]] std::string_view word) {
#if !defined(XPURUNTIME_WITH_CUDA)
  for (const std::string_view name : {"cuda_raw", "cublas", "cudnn"}) {
    if (word.starts_with(name)) {
      return "the backend " + std::string(name) + " is not in this build, which has no CUDA";
    }
  }
#else
  [[maybe_unused]] constexpr std::string_view lacking = " were not found when it was built";
#if !defined(XPURUNTIME_WITH_CUBLAS)
  if (word.starts_with("cublas")) {
    return "the backend cublas is not in this build: the headers of cuBLAS" + std::string(lacking);
  }
#endif
#if !defined(XPURUNTIME_WITH_CUDNN)
  if (word.starts_with("cudnn")) {
    return "the backend cudnn is not in this build: the headers of cuDNN" + std::string(lacking);
  }
#endif
#endif
  return {};
}

}  // namespace xpuruntime

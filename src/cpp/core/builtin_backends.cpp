// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
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

}  // namespace xpuruntime

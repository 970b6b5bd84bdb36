// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "cuda/check.h"
#include "cuda_raw/norm/norm.h"

// What the launches of forward and backward share.
namespace xpuruntime::cuda_raw::norm {

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t by) {
  return (value + by - 1) / by;
}

constexpr int size_of(NormType type) { return type == NormType::fp32 ? 4 : 2; }

/// A tensor and its row stride in elements.
struct Rows {
  const void* pointer;
  std::int64_t stride;
};

/// Whether every access of 16 bytes is aligned and no row ends inside one. Null is aligned.
inline bool aligned(NormType type, std::int64_t columns, std::initializer_list<Rows> tensors) {
  const std::int64_t width = 16 / size_of(type);
  if (columns % width != 0) return false;
  for (const Rows& rows : tensors) {
    if (rows.pointer == nullptr) continue;
    if (reinterpret_cast<std::uintptr_t>(rows.pointer) % 16 != 0) return false;
    if (rows.stride % width != 0) return false;
  }
  return true;
}

/// Calls `body` with the C++ type of `type` as its template argument.
template <typename Body>
void with_type(NormType type, Body&& body) {
  switch (type) {
    case NormType::fp32:
      body.template operator()<float>();
      break;
    case NormType::fp16:
      body.template operator()<__half>();
      break;
    case NormType::bf16:
      body.template operator()<__nv_bfloat16>();
      break;
  }
}

/// Lets `kernel` have more than 48 KiB of shared memory, its static part included, on the current
/// device.
inline void allow_shared(const void* kernel, std::size_t bytes) {
  constexpr std::size_t always_allowed = 40 * 1024;
  if (bytes <= always_allowed) return;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(bytes)),
              "cudaFuncSetAttribute");
}

/// Launches `kernel`; `early`: it waits by itself for the work enqueued before, so that its blocks
/// may be put in place while that still runs.
template <typename... Parameters, typename... Arguments>
void launch(dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream, bool early,
            void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cuda::check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
              "cudaLaunchKernelEx");
}

}  // namespace xpuruntime::cuda_raw::norm

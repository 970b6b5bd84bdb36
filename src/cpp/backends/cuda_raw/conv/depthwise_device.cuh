// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_raw/conv/depthwise_conv.h"
#include "cuda_raw/conv/depthwise_plan.h"
#include "cuda_raw/element.cuh"

// What the kernels of a depthwise convolution share.
namespace xpuruntime::cuda_raw::conv {

/// Adjacent elements that one access moves.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// Not inlined: a switch in an unrolled kernel would be there once a result.
inline __device__ __noinline__ float activate_smoothly(float x, int activation) {
  switch (activation) {
    case 2:
      return 0.5F * x * (1.0F + erff(x * 0.70710678118654752F));
    case 3:
      return 0.5F * x * (1.0F + tanhf(0.79788456080286536F * (x + 0.044715F * x * x * x)));
    default:
      return x / (1.0F + expf(-x));
  }
}

__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == 0) return x;
  if (activation == 1) return x < 0.0F ? 0.0F : x;  // keeps NaN
  return activate_smoothly(x, activation);
}

__device__ __forceinline__ int divide(int value, const Divisor& divisor) {
  const auto number = static_cast<unsigned>(value);
  return static_cast<int>(divisor.by == 1 ? number : __umulhi(number, divisor.factor));
}

/// Calls `body` with a null pointer to the C++ type of `type`: a branch that all threads take
/// alike, so that one kernel serves every type.
template <typename Body>
__device__ __forceinline__ void with_type(ConvType type, Body&& body) {
  if (type == ConvType::fp32) {
    body(static_cast<const float*>(nullptr));
  } else if (type == ConvType::fp16) {
    body(static_cast<const __half*>(nullptr));
  } else {
    body(static_cast<const __nv_bfloat16*>(nullptr));
  }
}

}  // namespace xpuruntime::cuda_raw::conv

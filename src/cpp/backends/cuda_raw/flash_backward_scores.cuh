// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flash_backward_params.cuh"
#include "mma.cuh"
#include "philox.cuh"

namespace xpuruntime::cuda_raw {

/// What is done to the 2 x 4 products q k^T that a lane holds in a pair of 16 x 8 fragments whose
/// rows are keys: element i of fragment t is key + 8 * (i / 2) and row + 8 * t + i % 2.
/// kGeneral is needed for a mask or for dropout; without it both are known to be absent.
template <bool kGeneral>
class FlashBackwardScores {
 public:
  __device__ FlashBackwardScores(const FlashBackwardParams& params, int batch, int head)
      : p_(params) {
    if constexpr (kGeneral) {
      mask_ = batch * p_.args.mask_strides[0] + head * p_.args.mask_strides[1];
      batch_head_ = static_cast<std::int64_t>(batch) * p_.heads + head;
    }
  }

  /// exp(S - lse) of one element.
  __device__ float probability(float product, float lse, int row, int key) const {
    if (!kGeneral || p_.args.mask_kind == 0) return exp2_fast(fmaf(product, p_.scale_log2, -lse));
    const bool inside = row < p_.q_length && key < p_.kv_length;
    const std::int64_t at =
        inside ? mask_ + row * p_.args.mask_strides[2] + key * p_.args.mask_strides[3] : 0;
    if (p_.args.mask_kind == 1) {
      const bool taken = inside && static_cast<const std::uint8_t*>(p_.args.mask)[at] != 0;
      return taken ? exp2_fast(fmaf(product, p_.scale_log2, -lse)) : 0.0F;
    }
    if (!inside) return 0.0F;
    float added = 0.0F;
    if (p_.args.mask_kind == 3) {
      added = static_cast<const float*>(p_.args.mask)[at];
    } else if (p_.args.bfloat16) {
      added = __bfloat162float(static_cast<const __nv_bfloat16*>(p_.args.mask)[at]);
    } else {
      added = __half2float(static_cast<const __half*>(p_.args.mask)[at]);
    }
    return exp2_fast((fmaf(product, p_.args.scale, added) - lse) * 1.4426950408889634F);
  }

  /// What dropout multiplies the eight elements by.
  __device__ void keep(float (&factor)[2][4], int row, int key) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i / 4][i % 4] = 1.0F;
    if (!kGeneral || p_.args.dropout_p == 0.0F) return;
    const std::uint32_t threshold = dropout_threshold(p_.args.dropout_p);
    const float kept = 1.0F / (1.0F - p_.args.dropout_p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = key + 8 * (i >> 1);
      const PhiloxWords words = dropout_words(p_.args.rng[0], p_.args.rng[1], batch_head_,
                                              static_cast<std::uint32_t>(row + (i & 1)),
                                              static_cast<std::uint32_t>(column));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const std::uint32_t word = (column & 1) != 0 ? words.word[2 * t + 1] : words.word[2 * t];
        factor[t][i] = word >= threshold ? kept : 0.0F;
      }
    }
  }

 private:
  const FlashBackwardParams& p_;
  std::int64_t mask_ = 0;
  std::int64_t batch_head_ = 0;
};

}  // namespace xpuruntime::cuda_raw

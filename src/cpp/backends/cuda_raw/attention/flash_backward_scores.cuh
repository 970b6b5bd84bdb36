// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda_raw/attention/flash_backward_params.cuh"
#include "cuda_raw/attention/flash_backward_work.cuh"
#include "cuda_raw/mma.cuh"
#include "cuda_raw/philox.cuh"

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

  /// Turns products into exp(S - lse). The lane's pairs of lse lie at shared address `lse`, 32
  /// bytes apart.
  template <int kTiles>
  __device__ void probabilities(float (&products)[kTiles][4], std::uint32_t lse, int row,
                                int key) const {
    const int kind = kGeneral ? p_.args.mask_kind : 0;
    if (kind == 0) return plain(products, lse);
    if (kind == 1) {
      return masked<std::uint8_t>(products, lse, row, key, [](std::uint8_t taken, float& product) {
        if (taken == 0) product = -INFINITY;
      });
    }
    const float scale = p_.args.scale;
    if (kind == 3) {
      return masked<float>(products, lse, row, key, [scale](float added, float& product) {
        product = fmaf(product, scale, added);
      });
    }
    if (p_.args.bfloat16) {
      return masked<__nv_bfloat16>(products, lse, row, key,
                                   [scale](__nv_bfloat16 added, float& product) {
                                     product = fmaf(product, scale, __bfloat162float(added));
                                   });
    }
    masked<__half>(products, lse, row, key, [scale](__half added, float& product) {
      product = fmaf(product, scale, __half2float(added));
    });
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
  template <int kTiles>
  __device__ void plain(float (&products)[kTiles][4], std::uint32_t lse) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 pair = load_shared_pair(lse + t * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products[t][i] =
            exp2_fast(fmaf(products[t][i], p_.scale_log2, (i & 1) ? -pair.y : -pair.x));
      }
    }
  }

  // Outside of the mask's rows and keys nothing is read; there lse is +inf or the caller clears.
  template <typename Item, int kTiles, typename Apply>
  __device__ void masked(float (&products)[kTiles][4], std::uint32_t lse, int row, int key,
                         Apply apply) const {
    constexpr bool kBoolean = sizeof(Item) == 1;
    const std::int64_t down = p_.args.mask_strides[2];
    const std::int64_t across = p_.args.mask_strides[3] * 8;
    const Item* at =
        static_cast<const Item*>(p_.args.mask) + mask_ + row * down + key * p_.args.mask_strides[3];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 pair = load_shared_pair(lse + t * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& product = products[t][i];
        if (kBoolean) product *= p_.scale_log2;
        if (row + 8 * t + (i & 1) < p_.q_length && key + 8 * (i >> 1) < p_.kv_length) {
          apply(at[((i & 1) ? down : 0) + ((i >> 1) ? across : 0)], product);
        }
        product -= (i & 1) ? pair.y : pair.x;
        product = exp2_fast(kBoolean ? product : product * 1.4426950408889634F);
      }
      at += 8 * down;
    }
  }

  const FlashBackwardParams& p_;
  std::int64_t mask_ = 0;
  std::int64_t batch_head_ = 0;
};

}  // namespace xpuruntime::cuda_raw

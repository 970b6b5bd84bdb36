// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "flash_forward.h"
#include "philox.cuh"

namespace xpuruntime::cuda_raw {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// What is done to scores and weights besides the softmax, for the kernels that do it.
struct FlashExtras {
  const void* mask;
  int mask_kind;
  std::int64_t mask_strides[4];
  float dropout_p;
  const std::int64_t* rng;
};

inline FlashExtras flash_extras(const FlashForwardArgs& args) {
  FlashExtras extras{args.mask, args.mask_kind, {}, args.dropout_p, args.rng};
  for (int i = 0; i < 4; ++i) extras.mask_strides[i] = args.mask_strides[i];
  return extras;
}

template <typename Element>
__device__ __forceinline__ float masked_score(float score, Element mask) {
  if constexpr (sizeof(Element) == 1) {
    return mask != 0 ? score : -INFINITY;
  } else {
    return score + static_cast<float>(mask) * kLog2E;
  }
}

/// Masks a lane's part of two rows, `row` and `row` + 8, of an accumulator: scores in units of log2
/// at columns `column` + 8 n and the next, four a step n. `mask` is at the head's start.
template <int kCount, typename Element>
__device__ __forceinline__ void mask_rows(float* scores, const Element* mask,
                                          const std::int64_t (&strides)[4], int row, int column,
                                          int q_length, int kv_length) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= q_length) continue;
    const Element* const from = mask + (row + half * 8) * strides[2] + column * strides[3];
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (column + n * 8 + e < kv_length) {
          float& score = scores[n * 4 + half * 2 + e];
          score = masked_score(score, from[(n * 8 + e) * strides[3]]);
        }
      }
    }
  }
}

/// The same for every kind of mask. `head_offset` leads to the head's start.
template <int kCount, bool kBfloat16>
__device__ __forceinline__ void mask_scores(float* scores, const FlashExtras& extras,
                                            std::int64_t head_offset, int row, int column,
                                            int q_length, int kv_length) {
  const auto apply = [&](auto element) {
    using Element = decltype(element);
    mask_rows<kCount>(scores, static_cast<const Element*>(extras.mask) + head_offset,
                      extras.mask_strides, row, column, q_length, kv_length);
  };
  if (extras.mask_kind == kMaskBoolean) {
    apply(std::uint8_t{});
  } else if (extras.mask_kind == kMaskFloat32) {
    apply(float{});
  } else if constexpr (kBfloat16) {
    apply(__nv_bfloat16{});
  } else {
    apply(__half{});
  }
}

/// The dropout of one launch, read once.
struct Dropout {
  std::int64_t seed = 0;
  std::int64_t offset = 0;
  std::uint32_t threshold = 0;  ///< 0: nothing is dropped
  float keep_scale = 1.0f;

  Dropout() = default;
  __device__ __forceinline__ explicit Dropout(const FlashExtras& extras) {
    if (extras.dropout_p > 0.0f) {
      seed = extras.rng[0];
      offset = extras.rng[1];
      threshold = dropout_threshold(extras.dropout_p);
      keep_scale = 1.0f / (1.0f - extras.dropout_p);
    }
  }
};

/// Zeros the weights that are dropped; arguments as for mask_scores.
template <int kCount>
__device__ __forceinline__ void drop_weights(float* weights, const Dropout& dropout, int bh,
                                             int row, int column) {
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    const PhiloxWords words =
        dropout_words(dropout.seed, dropout.offset, bh, static_cast<std::uint32_t>(row),
                      static_cast<std::uint32_t>(column + n * 8));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (words.word[e] < dropout.threshold) weights[n * 4 + e] = 0.0f;
    }
  }
}

}  // namespace xpuruntime::cuda_raw

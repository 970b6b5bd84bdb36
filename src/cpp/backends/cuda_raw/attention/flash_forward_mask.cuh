// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda_raw/attention/flash_forward.h"
#include "cuda_raw/philox.cuh"

namespace xpuruntime::cuda_raw {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// What is done to scores and weights besides the softmax, for the kernels that do it.
struct FlashExtras {
  const void* mask;
  int mask_kind;
  bool mask_pairs;  // two columns, the first of them even, can be read at once
  std::int64_t mask_strides[4];
  float dropout_p;
  const std::int64_t* rng;
};

inline FlashExtras flash_extras(const FlashForwardArgs& args) {
  FlashExtras extras{args.mask, args.mask_kind, false, {}, args.dropout_p, args.rng};
  const int bytes = args.mask_kind == kMaskBoolean ? 1 : args.mask_kind == kMaskFloat32 ? 4 : 2;
  const std::int64_t sizes[3] = {args.batch, args.heads, args.q_length};
  bool pairs = args.mask_strides[3] == 1 &&
               reinterpret_cast<std::uintptr_t>(args.mask) % static_cast<unsigned>(2 * bytes) == 0;
  for (int i = 0; i < 4; ++i) extras.mask_strides[i] = args.mask_strides[i];
  for (int i = 0; i < 3; ++i) pairs = pairs && (sizes[i] <= 1 || args.mask_strides[i] % 2 == 0);
  extras.mask_pairs = pairs;
  return extras;
}

template <typename Element>
struct alignas(2 * sizeof(Element)) MaskPair {
  Element of[2];
};

template <typename Element>
__device__ __forceinline__ float masked_score(float score, Element mask) {
  if constexpr (sizeof(Element) == 1) {
    return mask != 0 ? score : -INFINITY;
  } else {
    return fmaf(static_cast<float>(mask), kLog2E, score);
  }
}

/// Masks a lane's part of two rows, `row` and `row` + 8, of an accumulator: scores in units of log2
/// at columns `column` + 8 n and the next, four a step n. `mask` is at the head's start. Rows past
/// the last one get that one's mask, which is of no consequence.
template <int kCount, typename Element>
__device__ __forceinline__ void mask_rows(float* scores, const Element* mask,
                                          const FlashExtras& extras, int row, int column,
                                          int q_length, int kv_length) {
  const bool whole = extras.mask_pairs && column / 8 * 8 + kCount * 2 <= kv_length;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Element* const from = mask + min(row + half * 8, q_length - 1) * extras.mask_strides[2];
    if (whole) {
      const auto* const pairs = reinterpret_cast<const MaskPair<Element>*>(from + column);
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
        const MaskPair<Element> pair = pairs[n * 4];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n * 4 + half * 2 + e];
          score = masked_score(score, pair.of[e]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = column + n * 8 + e;
          float& score = scores[n * 4 + half * 2 + e];
          if (at < kv_length) score = masked_score(score, from[at * extras.mask_strides[3]]);
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
    mask_rows<kCount>(scores, static_cast<const Element*>(extras.mask) + head_offset, extras, row,
                      column, q_length, kv_length);
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

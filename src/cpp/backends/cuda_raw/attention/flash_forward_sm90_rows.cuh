// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda_raw/attention/flash_forward_sm90_plan.cuh"
#include "cuda_raw/mma.cuh"

// The softmax of a warpgroup's rows, in registers, and their way out.
namespace xpuruntime::cuda_raw::hopper {

/// The state of one warpgroup's 64 rows; a thread holds parts of rows `lane / 4` and that + 8 of
/// its warp's sixteen.
template <typename S>
struct Rows {
  float out[S::kHeadDim / 2];
  float score[S::kColumns / 2];
  std::uint32_t weight[S::kColumns / 16][4];
  float top[2];
  float sum[2];
};

/// Columns from end[h] on, counted from this thread's first, are out for its row h.
template <typename S>
__device__ __forceinline__ void mask_columns(Rows<S>& rows, int end0, int end1) {
#pragma unroll
  for (int n = 0; n < S::kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (n * 8 + e >= end0) rows.score[n * 4 + e] = -INFINITY;
      if (n * 8 + e >= end1) rows.score[n * 4 + 2 + e] = -INFINITY;
    }
  }
}

/// Turns scores to weights and keeps the running maximum and sum; what was summed up under the last
/// maximum is to be multiplied by rescale. Scores times `factor` are in units of log2.
template <typename S>
__device__ __forceinline__ void online_softmax(Rows<S>& rows, float factor, float (&rescale)[2]) {
  constexpr int kSteps = S::kColumns / 8;
  float base[2];
  float sum[2][2];  // two chains of additions a row
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float tops[2] = {rows.top[half], rows.score[half * 2 + 1]};
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      tops[0] = fmaxf(tops[0], rows.score[n * 4 + half * 2]);
      tops[1] = fmaxf(tops[1], rows.score[n * 4 + half * 2 + 1]);
    }
    float top = fmaxf(tops[0], tops[1]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    base[half] = top == -INFINITY ? 0.0f : top * factor;
    rescale[half] = exp2_fast(rows.top[half] * factor - base[half]);
    rows.top[half] = top;
    sum[half][0] = rows.sum[half] * rescale[half];
    sum[half][1] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& score = rows.score[n * 4 + e];
      score = exp2_fast(fmaf(score, factor, -base[e / 2]));
      sum[e / 2][e % 2] += score;
    }
  }
  rows.sum[0] = sum[0][0] + sum[0][1];
  rows.sum[1] = sum[1][0] + sum[1][1];
}

template <typename S, bool kBfloat16>
__device__ __forceinline__ void pack_weights(Rows<S>& rows) {
#pragma unroll
  for (int step = 0; step < S::kColumns / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows.weight[step][i] =
          pack<kBfloat16>(rows.score[step * 8 + i * 2], rows.score[step * 8 + i * 2 + 1]);
    }
  }
}

/// Transposes a 4 x 4 matrix of which each lane of four holds a column.
__device__ __forceinline__ uint4 transpose(const std::uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1;
  const bool high = lane & 2;
  std::uint32_t pairs[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t keep = odd ? words[2 * i + 1] : words[2 * i];
    const std::uint32_t got =
        __shfl_xor_sync(0xffffffffu, odd ? words[2 * i] : words[2 * i + 1], 1);
    pairs[i][0] = odd ? got : keep;
    pairs[i][1] = odd ? keep : got;
  }
  uint4 row;
  const std::uint32_t got0 = __shfl_xor_sync(0xffffffffu, high ? pairs[0][0] : pairs[1][0], 2);
  const std::uint32_t got1 = __shfl_xor_sync(0xffffffffu, high ? pairs[0][1] : pairs[1][1], 2);
  row.x = high ? got0 : pairs[0][0];
  row.y = high ? got1 : pairs[0][1];
  row.z = high ? pairs[1][0] : got0;
  row.w = high ? pairs[1][1] : got1;
  return row;
}

/// Divides by the sums, and writes a warp's sixteen rows of out and lse, the first of them
/// `first_row`.
template <typename S, bool kBfloat16>
__device__ __forceinline__ void finish(const Problem& problem, const Item& item,
                                       const float (&values)[S::kHeadDim / 2],
                                       const float (&tops)[2], const float (&sums)[2], float factor,
                                       float keep_scale, int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = sums[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float weight = sum == 0.0f ? 0.0f : keep_scale / sum;
    const int row = first_row + half * 8 + lane / 4;
    if (problem.lse != nullptr && lane % 4 == 0 && row < problem.q_length) {
      problem.lse[static_cast<std::int64_t>(item.bh) * problem.q_length + row] =
          sum == 0.0f ? -INFINITY : tops[half] * factor * kLn2 + logf(sum);
    }
    std::uint16_t* const out = static_cast<std::uint16_t*>(problem.out) +
                               item.batch * problem.out_strides[0] +
                               item.head * problem.out_strides[1] + row * problem.out_strides[2];
#pragma unroll
    for (int d = 0; d < S::kHeadDim; d += 32) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (d / 8 + i) * 4 + half * 2;
        words[i] = pack<kBfloat16>(values[at] * weight, values[at + 1] * weight);
      }
      const uint4 eight = transpose(words, lane);
      const int column = d + lane % 4 * 8;
      if (row < problem.q_length && column < problem.head_dim) {
        *reinterpret_cast<uint4*>(out + column) = eight;
      }
    }
  }
}

}  // namespace xpuruntime::cuda_raw::hopper

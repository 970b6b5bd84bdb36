// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_device.cuh"

namespace xpuruntime::cuda_raw::norm {

/// x, or x + residual rounded to their type.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> add(const Pack<T, kWidth>& x,
                                               const Pack<T, kWidth>& residual) {
  float sum[kWidth];
  float more[kWidth];
  unpack(x, sum);
  unpack(residual, more);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += more[i];
  return pack_up<T, kWidth>(sum);
}

/// The weight and bias of one pack.
template <typename T, int kWidth>
struct Affine {
  float weight[kWidth];
  float bias[kWidth];

  __device__ __forceinline__ void load(const NormForwardArgs& args, int index) {
    const bool is_fp32 = args.weight_type == NormType::fp32;
    load_weight<T, kWidth>(args.weight, is_fp32, 1.0F, index, weight);
    load_weight<T, kWidth>(args.bias, is_fp32, 0.0F, index, bias);
  }
  __device__ __forceinline__ Pack<T, kWidth> apply(const Pack<T, kWidth>& pack, float mean,
                                                   float rstd) const {
    float value[kWidth];
    unpack(pack, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] = (value[i] - mean) * rstd * weight[i] + bias[i];
    return pack_up<T, kWidth>(value);
  }
};

/// As Affine does, but in few registers: both as they lie in memory where kTogether and their type
/// allow it, else one after the other.
template <bool kTogether, typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> apply_affine(const NormForwardArgs& args, int index,
                                                        const Pack<T, kWidth>& pack, float mean,
                                                        float rstd) {
  const bool is_fp32 = args.weight_type == NormType::fp32;
  float value[kWidth];
  float factor[kWidth];
  if constexpr (kTogether && Pack<T, kWidth>::kPairs) {
    if (!is_fp32 && args.weight != nullptr && args.bias != nullptr) {
      const uint4 weight = __ldg(static_cast<const uint4*>(args.weight) + index);
      const uint4 bias = __ldg(static_cast<const uint4*>(args.bias) + index);
      unpack(pack, value);
      unpack(__builtin_bit_cast(Pack<T, kWidth>, weight), factor);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] = (value[i] - mean) * rstd * factor[i];
      unpack(__builtin_bit_cast(Pack<T, kWidth>, bias), factor);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] += factor[i];
      return pack_up<T, kWidth>(value);
    }
  }
  unpack(pack, value);
  load_weight<T, kWidth>(args.weight, is_fp32, 1.0F, index, factor);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] = (value[i] - mean) * rstd * factor[i];
  if (args.bias != nullptr) {
    load_weight<T, kWidth>(args.bias, is_fp32, 0.0F, index, factor);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] += factor[i];
  }
  return pack_up<T, kWidth>(value);
}

/// A team of threads a row, kPacks packs of the row a thread, in registers. Blocks are many and
/// short: in the order in which the device starts them, reads and writes stay close together in
/// memory, which a loop over rows would not keep up. kEarly reads weight and bias before the sums
/// are known: for calls of few rows, where nothing else hides the time that takes.
template <typename T, int kWidth, int kPacks, int kThreads, int kBlocks, bool kResidual,
          bool kEarly>
__global__ void __launch_bounds__(kThreads, kBlocks)
    forward_rows(const __grid_constant__ NormForwardArgs args) {
  using Item = Pack<T, kWidth>;
  __shared__ float2 scratch[kThreads / kWarp];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const RowTeam team;
  const int packs = static_cast<int>(args.columns) / kWidth;
  const int first = static_cast<int>(threadIdx.x);
  const Item* from = row_of<T, kWidth>(args.x, row, args.x_row_stride);

  Item held[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int index = p * team.threads + first;
    held[p] = index < packs ? load_once(from + index) : Item{};
  }
  const Item* const more = row_of<T, kWidth>(args.residual, row, args.residual_row_stride);
  Item added[kResidual && kEarly ? kPacks : 1];
  Affine<T, kWidth> affine[kEarly ? kPacks : 1];
  if constexpr (kEarly) {
#pragma unroll
    for (int p = 0; kResidual && p < kPacks; ++p) {
      const int index = p * team.threads + first;
      added[p] = index < packs ? load_once(more + index) : Item{};
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * team.threads + first;
      if (index < packs) affine[p].load(args, index);
    }
  }
  if constexpr (kResidual) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * team.threads + first;
      if (index < packs) {
        held[p] = add(held[p], kEarly ? added[kEarly ? p : 0] : load_once(more + index));
      }
    }
    if (args.sum_out != nullptr) {
      Item* const sums = row_of<T, kWidth>(args.sum_out, row, args.sum_row_stride);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int index = p * team.threads + first;
        if (index < packs) store_once(sums + index, held[p]);
      }
    }
  }

  // Packs that a warp holds, all of its lanes together.
  auto packs_of = [&](int warp) {
    int count = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      count += min(max(packs - p * team.threads - warp * kWarp, 0), kWarp);
    }
    return static_cast<float>(count * kWidth);
  };

  Moments moments{0.0F, 0.0F};
  if (!args.rms) {
    // Distances from one element of the warp lose nothing where all are far from zero.
    float value[kWidth];
    unpack(held[0], value);
    const float pivot = __shfl_sync(0xffffffffU, value[0], 0);
    float sum = 0.0F;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * team.threads + first >= packs) break;
      unpack(held[p], value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += value[i] - pivot;
    }
    moments.mean = pivot + sum_warp(sum) / fmaxf(packs_of(team.warp), 1.0F);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    keep_packed(held[p]);
    if (p * team.threads + first >= packs) continue;
    float value[kWidth];
    unpack(held[p], value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float apart = value[i] - moments.mean;
      moments.squares += apart * apart;
    }
  }
  moments.squares = sum_warp(moments.squares);
  const float columns = static_cast<float>(args.columns);
  if (team.warps > 1) {
    moments = join_warps(team, moments, packs_of(team.lane & (team.lanes - 1)), columns, args.rms,
                         scratch);
  }
  const float rstd = rsqrtf(moments.squares / columns + args.epsilon);
  if (first == 0) {
    if (args.mean != nullptr) args.mean[row] = moments.mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
  Item* const to = row_of<T, kWidth>(args.y, row, args.y_row_stride);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int index = p * team.threads + first;
    keep_packed(held[p]);
    if (index >= packs) break;
    if constexpr (kEarly) {
      store_once(to + index, affine[p].apply(held[p], moments.mean, rstd));
    } else {
      store_once(to + index, apply_affine<!kResidual>(args, index, held[p], moments.mean, rstd));
    }
  }
}

/// Rows too long for registers: a block a row, which is read twice.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    forward_long_rows(const __grid_constant__ NormForwardArgs args) {
  using Item = Pack<T, kWidth>;
  constexpr int kChunk = kWidth == 1 ? 16 : 32 / kWidth;  // packs
  __shared__ float2 scratch[kMaxWarps];
  __shared__ float counts[kMaxWarps];
  const std::int64_t row = blockIdx.x;
  const RowTeam team;
  const int packs = static_cast<int>(args.columns) / kWidth;
  const int first = static_cast<int>(threadIdx.x);
  const Item* from = row_of<T, kWidth>(args.x, row, args.x_row_stride);
  const Item* more = row_of<T, kWidth>(args.residual, row, args.residual_row_stride);
  auto fetch = [&](int index) {
    const Item item = from[index];
    return args.residual != nullptr ? add(item, more[index]) : item;
  };

  // Each chunk by its own mean, in distances from its first element; then what is known of two sets
  // of elements gives that of both.
  float count = 0.0F;
  Moments own{0.0F, 0.0F};
  for (int start = first; start < packs; start += kChunk * team.threads) {
    Item held[kChunk];
#pragma unroll
    for (int p = 0; p < kChunk; ++p) {
      const int index = start + p * team.threads;
      held[p] = index < packs ? fetch(index) : Item{};
    }
    float value[kWidth];
    unpack(held[0], value);
    const float pivot = value[0];
    float here = 0.0F;
    float sum = 0.0F;
#pragma unroll
    for (int p = 0; p < kChunk; ++p) {
      if (start + p * team.threads >= packs) break;
      here += static_cast<float>(kWidth);
      unpack(held[p], value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += value[i] - pivot;
    }
    const float mean = args.rms ? 0.0F : pivot + sum / here;
    float squares = 0.0F;
#pragma unroll
    for (int p = 0; p < kChunk; ++p) {
      if (start + p * team.threads >= packs) break;
      unpack(held[p], value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) squares += (value[i] - mean) * (value[i] - mean);
    }
    const float share = here / (count + here);
    const float apart = mean - own.mean;
    own.mean += apart * share;
    own.squares += squares + apart * apart * count * share;
    count += here;
  }
  const float all = sum_warp(count);
  Moments moments;
  const float pivot = __shfl_sync(0xffffffffU, own.mean, 0);
  moments.mean = pivot + sum_warp((own.mean - pivot) * count) / fmaxf(all, 1.0F);
  const float apart = own.mean - moments.mean;
  moments.squares = sum_warp(own.squares + apart * apart * count);
  if (team.lane == 0) counts[team.warp] = all;
  __syncthreads();
  const int other = team.lane & (team.lanes - 1);
  const float columns = static_cast<float>(args.columns);
  moments = join_warps(team, moments, other < team.warps ? counts[other] : 0.0F, columns, args.rms,
                       scratch);

  const float rstd = rsqrtf(moments.squares / columns + args.epsilon);
  if (first == 0) {
    if (args.mean != nullptr) args.mean[row] = moments.mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
  for (int index = first; index < packs; index += team.threads) {
    const Item item = fetch(index);
    if (args.sum_out != nullptr) {
      store_once(row_of<T, kWidth>(args.sum_out, row, args.sum_row_stride) + index, item);
    }
    store_once(row_of<T, kWidth>(args.y, row, args.y_row_stride) + index,
               apply_affine<false>(args, index, item, moments.mean, rstd));
  }
}

}  // namespace xpuruntime::cuda_raw::norm

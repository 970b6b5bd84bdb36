// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_backward_sums.cuh"
#include "cuda_raw/norm/norm_device.cuh"

namespace xpuruntime::cuda_raw::norm {

/// Rows too long for registers: a block a row, which is read twice. Leaves the partial sums to
/// backward_columns.
template <typename T, int kWidth>
__global__ void __launch_bounds__(1024)
    backward_long_rows(const __grid_constant__ NormBackwardArgs args) {
  using Item = Pack<T, kWidth>;
  __shared__ float2 scratch[2][kMaxWarps];
  const RowTeam team;
  const int packs = static_cast<int>(args.columns) / kWidth;
  const float scale = 1.0F / static_cast<float>(args.columns);
  const bool weight_is_fp32 = args.weight_type == NormType::fp32;
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const Item* grads = row_of<T, kWidth>(args.grad_y, row, args.grad_y_row_stride);
    const Item* xs = row_of<T, kWidth>(args.x, row, args.x_row_stride);
    const Item* extras = row_of<T, kWidth>(args.grad_sum, row, args.grad_sum_row_stride);
    Item* const grad_x = row_of<T, kWidth>(args.grad_x, row, args.grad_x_row_stride);
    const float rstd = args.rstd[row];
    const float mean = args.rms ? 0.0F : args.mean[row];
    float average = 0.0F;
    float projection = 0.0F;
    for (int index = static_cast<int>(threadIdx.x); index < packs; index += team.threads) {
      float weight[kWidth];
      float g[kWidth];
      float value[kWidth];
      load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F, index, weight);
      unpack(grads[index], g);
      unpack(xs[index], value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float weighted = g[i] * weight[i];
        average += weighted;
        projection += weighted * ((value[i] - mean) * rstd);
      }
    }
    average = sum_warp(average);
    projection = sum_warp(projection);
    if (team.lane == 0) scratch[turn][team.warp] = make_float2(average, projection);
    __syncthreads();
    const int other = team.lane & (team.lanes - 1);
    const float2 found = other < team.warps ? scratch[turn][other] : make_float2(0.0F, 0.0F);
    average = args.rms ? 0.0F : sum_lanes(found.x, team.lanes) * scale;
    projection = sum_lanes(found.y, team.lanes) * scale;
    turn ^= 1;
    for (int index = static_cast<int>(threadIdx.x); index < packs; index += team.threads) {
      float weight[kWidth];
      float g[kWidth];
      float value[kWidth];
      float more[kWidth] = {};
      load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F, index, weight);
      unpack(grads[index], g);
      unpack(xs[index], value);
      if (args.grad_sum != nullptr) unpack(extras[index], more);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = (value[i] - mean) * rstd;
        value[i] = rstd * (g[i] * weight[i] - average - xhat * projection) + more[i];
      }
      store_once(grad_x + index, pack_up<T, kWidth>(value));
    }
  }
}

constexpr int kColumnTeams = 8;

/// Partial sums of rows too long for registers: a block a strip of kWarp packs and a run of
/// `rows_per_part` rows, which are row blockIdx.y of the partial sums.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kColumnTeams)
    backward_columns(const __grid_constant__ NormBackwardArgs args, const Partials partials,
                     std::int64_t rows_per_part) {
  __shared__ float room[kWidth][kWarp];
  const int packs = static_cast<int>(args.columns) / kWidth;
  const int index = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
  const std::int64_t first = blockIdx.y * rows_per_part;
  const std::int64_t last = min(first + rows_per_part, args.rows);
  float weight_sums[kWidth] = {};
  float bias_sums[kWidth] = {};
  if (index < packs) {
    for (std::int64_t row = first + threadIdx.y; row < last; row += kColumnTeams) {
      const float rstd = args.rstd[row];
      const float mean = args.rms ? 0.0F : args.mean[row];
      float g[kWidth];
      float value[kWidth];
      unpack(row_of<T, kWidth>(args.grad_y, row, args.grad_y_row_stride)[index], g);
      unpack(row_of<T, kWidth>(args.x, row, args.x_row_stride)[index], value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        weight_sums[i] += g[i] * ((value[i] - mean) * rstd);
        bias_sums[i] += g[i];
      }
    }
  }
  auto join = [&](const float (&sums)[kWidth], float* to) {
    for (unsigned int turn = 0; turn < kColumnTeams; ++turn) {
      __syncthreads();
      if (turn != threadIdx.y || index >= packs) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        float& cell = room[i][threadIdx.x];
        cell = turn == 0 ? sums[i] : cell + sums[i];
        if (turn + 1 == kColumnTeams) {
          to[blockIdx.y * args.columns + static_cast<std::int64_t>(index) * kWidth + i] = cell;
        }
      }
    }
  };
  if (partials.weight != nullptr) join(weight_sums, partials.weight);
  if (partials.bias != nullptr) join(bias_sums, partials.bias);
}

}  // namespace xpuruntime::cuda_raw::norm

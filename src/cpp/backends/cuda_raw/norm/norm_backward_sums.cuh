// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_raw/norm/norm_device.cuh"

// The gradients, with xhat = (x - mean) * rstd and g = grad_y * weight:
//   grad_x      = rstd * (g - average(g) - xhat * average(g * xhat)) + grad_sum
//   grad_weight = sum over rows of grad_y * xhat
//   grad_bias   = sum over rows of grad_y
// RMS norm has mean 0 and no average(g).
namespace xpuruntime::cuda_raw::norm {

/// Partial sums of grad_weight, then those of grad_bias: [parts][columns] each, fp32.
struct Partials {
  float* weight;  ///< Or null: not wanted.
  float* bias;    ///< Or null: not wanted.
};

constexpr int kPartTeams = 32;

/// Adds the partial sums of every column up in a fixed order. Block row 0 makes grad_weight, block
/// row 1 grad_bias. `width` undoes the order of the words that backward_rows leaves.
template <typename T>
__global__ void __launch_bounds__(kWarp* kPartTeams)
    add_partials(const Partials partials, int parts, int columns, int width, T* grad_weight,
                 T* grad_bias) {
  __shared__ float room[kPartTeams][kWarp + 1];
  const float* from = blockIdx.y == 0 ? partials.weight : partials.bias;
  T* to = blockIdx.y == 0 ? grad_weight : grad_bias;
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  if (to == nullptr) return;
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kWarp + x;
  float sum = 0.0F;
  if (column < columns) {
    for (int part = y; part < parts; part += kPartTeams) {
      sum += from[static_cast<std::int64_t>(part) * columns + column];
    }
  }
  room[y][x] = sum;
  __syncthreads();
  // Warp y adds up column y of the strip.
  sum = sum_warp(room[x][y]);
  const int word = static_cast<int>(blockIdx.x) * kWarp + y;
  const int packs = columns / width;
  if (x == 0 && word < columns) to[word % packs * width + word / packs] = narrow<T>(sum);
}

}  // namespace xpuruntime::cuda_raw::norm

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/norm.h"
#include "cuda_raw/norm_device.cuh"

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

__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

constexpr int kMostStages = 4;

/// Waits until at most `left` of this thread's copy groups are under way: 0 to kMostStages - 1.
__device__ __forceinline__ void wait_for_copies(int left) {
  if (left == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else if (left == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else if (left == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

template <typename Item, int kPacks>
struct Held {
  Item grad[kPacks];
  Item x[kPacks];
  Item extra[kPacks];
};
template <typename Item>
struct Held<Item, 0> {};

/// Hides that an index is the same in every turn of a loop, where keeping what it leads to would
/// need too many registers.
template <bool kHidden>
__device__ __forceinline__ int again(int index) {
  if constexpr (kHidden) asm volatile("" : "+r"(index));
  return index;
}

/// Adds the sums of every team of the block up, in the order of the teams, and writes them as one
/// row of the partial sums. `room` has one float a column.
template <int kWidth, int kPacks>
__device__ __forceinline__ void write_partial(const RowTeam& team,
                                              const float (&sums)[kPacks][kWidth], int packs,
                                              float* to, float* room) {
  for (unsigned int turn = 0; turn < blockDim.y; ++turn) {
    __syncthreads();
    if (turn != threadIdx.y) continue;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * team.threads + static_cast<int>(threadIdx.x);
      if (index >= packs) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // Neighbouring threads on neighbouring words: no bank is asked twice.
        float& cell = room[i * packs + index];
        const float sum = turn == 0 ? sums[p][i] : cell + sums[p][i];
        if (turn + 1 < blockDim.y) {
          cell = sum;
        } else {
          to[index * kWidth + i] = sum;
        }
      }
    }
  }
}

/// A team of threads a row, kPacks packs of the row a thread, which stay in registers. A block
/// takes every (gridDim.x * blockDim.y)th row; each thread copies its own packs of coming rows to
/// its own places in shared memory, `stages` rows ahead, so that it has only itself to wait for.
/// One-element packs are read directly.
template <typename T, int kWidth, int kPacks, int kThreads, int kBlocks, bool kHeld>
__global__ void __launch_bounds__(kThreads, kBlocks)
    backward_rows(const __grid_constant__ NormBackwardArgs args, const Partials partials,
                  int stages) {
  using Item = Pack<T, kWidth>;
  constexpr bool kCopied = sizeof(Item) == kAccessBytes;
  extern __shared__ uint4 shared[];
  __shared__ float2 scratch[2][kThreads / kWarp];

  const RowTeam team;
  const int packs = static_cast<int>(args.columns) / kWidth;
  const float scale = 1.0F / static_cast<float>(args.columns);
  const bool weight_is_fp32 = args.weight_type == NormType::fp32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;

  const int inputs = args.grad_sum != nullptr ? 3 : 2;
  const int input_size = kPacks * team.threads;
  const int stage_size = inputs * input_size * static_cast<int>(blockDim.y);
  auto* mine = reinterpret_cast<Item*>(shared) + threadIdx.y * inputs * input_size + threadIdx.x;

  auto copy_row = [&](std::int64_t from_row, int stage) {
    if (from_row < args.rows) {
      const Item* grad = row_of<T, kWidth>(args.grad_y, from_row, args.grad_y_row_stride);
      const Item* x = row_of<T, kWidth>(args.x, from_row, args.x_row_stride);
      const Item* extra = row_of<T, kWidth>(args.grad_sum, from_row, args.grad_sum_row_stride);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int index = p * team.threads + static_cast<int>(threadIdx.x);
        Item* place = mine + stage * stage_size + p * team.threads;
        if (index >= packs) break;
        copy_async(place, grad + index);
        copy_async(place + input_size, x + index);
        if (inputs == 3) copy_async(place + 2 * input_size, extra + index);
      }
    }
    end_copy_group();
  };

  float weight_sums[kPacks][kWidth] = {};
  float bias_sums[kPacks][kWidth] = {};
  float mean = 0.0F;
  float rstd = 0.0F;
  if (row < args.rows) {
    rstd = args.rstd[row];
    if (!args.rms) mean = args.mean[row];
  }
  if constexpr (kCopied) {
    for (int stage = 0; stage < stages; ++stage) copy_row(row + stage * step, stage);
  }
  int stage = 0;
  int turn = 0;
  for (; row < args.rows; row += step) {
    Held<Item, kHeld ? kPacks : 0> held;
    if constexpr (kCopied) wait_for_copies(stages - 1);
    const Item* const here = mine + stage * stage_size;
    auto fetch = [&](int p, int index, Item& grad, Item& x, Item& extra) {
      if constexpr (kCopied) {
        const Item* place = here + p * team.threads;
        grad = place[0];
        x = place[input_size];
        if (inputs == 3) extra = place[2 * input_size];
      } else {
        grad = row_of<T, kWidth>(args.grad_y, row, args.grad_y_row_stride)[index];
        x = row_of<T, kWidth>(args.x, row, args.x_row_stride)[index];
        if (inputs == 3)
          extra = row_of<T, kWidth>(args.grad_sum, row, args.grad_sum_row_stride)[index];
      }
    };
    if constexpr (kHeld) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int index = p * team.threads + static_cast<int>(threadIdx.x);
        if (index < packs) fetch(p, index, held.grad[p], held.x[p], held.extra[p]);
      }
      if constexpr (kCopied) copy_row(row + stages * step, stage);
    }
    float next_mean = 0.0F;
    float next_rstd = 0.0F;
    if (row + step < args.rows) {
      next_rstd = args.rstd[row + step];
      if (!args.rms) next_mean = args.mean[row + step];
    }

    float average = 0.0F;
    float projection = 0.0F;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * team.threads + static_cast<int>(threadIdx.x);
      if (index >= packs) break;
      float weight[kWidth];
      float g[kWidth];
      float value[kWidth];
      load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F,
                             again<(kPacks * kWidth > 16)>(index), weight);
      if constexpr (kHeld) {
        unpack(held.grad[p], g);
        unpack(held.x[p], value);
      } else {
        Item grad{};
        Item x{};
        Item extra{};
        fetch(p, index, grad, x, extra);
        unpack(grad, g);
        unpack(x, value);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = (value[i] - mean) * rstd;
        const float weighted = g[i] * weight[i];
        average += weighted;
        projection += weighted * xhat;
        weight_sums[p][i] += g[i] * xhat;
        bias_sums[p][i] += g[i];
      }
    }
    average = sum_warp(average);
    projection = sum_warp(projection);
    if (team.warps > 1) {
      float2* const room = scratch[turn] + threadIdx.y * team.warps;
      if (team.lane == 0) room[team.warp] = make_float2(average, projection);
      team.wait();
      const int other = team.lane & (team.lanes - 1);
      const float2 found = other < team.warps ? room[other] : make_float2(0.0F, 0.0F);
      average = sum_lanes(found.x, team.lanes);
      projection = sum_lanes(found.y, team.lanes);
      turn ^= 1;
    }
    average = args.rms ? 0.0F : average * scale;
    projection *= scale;

    Item* const grad_x = row_of<T, kWidth>(args.grad_x, row, args.grad_x_row_stride);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * team.threads + static_cast<int>(threadIdx.x);
      if (index >= packs) break;
      float weight[kWidth];
      float g[kWidth];
      float value[kWidth];
      float more[kWidth] = {};
      load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F,
                             again<(kPacks * kWidth > 16)>(index), weight);
      if constexpr (kHeld) {
        keep_packed(held.grad[p]);
        keep_packed(held.x[p]);
        unpack(held.grad[p], g);
        unpack(held.x[p], value);
        if (inputs == 3) unpack(held.extra[p], more);
      } else {
        Item grad{};
        Item x{};
        Item extra{};
        fetch(p, index, grad, x, extra);
        unpack(grad, g);
        unpack(x, value);
        if (inputs == 3) unpack(extra, more);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = (value[i] - mean) * rstd;
        value[i] = rstd * (g[i] * weight[i] - average - xhat * projection) + more[i];
      }
      store_once(grad_x + index, pack_up<T, kWidth>(value));
    }
    if constexpr (kCopied) {
      if constexpr (!kHeld) copy_row(row + stages * step, stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    mean = next_mean;
    rstd = next_rstd;
  }

  if constexpr (kCopied) wait_for_copies(0);
  auto* room = reinterpret_cast<float*>(shared);
  const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * args.columns;
  if (partials.weight != nullptr) {
    write_partial<kWidth, kPacks>(team, weight_sums, packs, partials.weight + part, room);
  }
  if (partials.bias != nullptr) {
    write_partial<kWidth, kPacks>(team, bias_sums, packs, partials.bias + part, room);
  }
}

/// Rows too long for registers: a block a row, which is read twice. Leaves the partial sums to
/// backward_columns.
template <typename T, int kWidth>
__global__ void __launch_bounds__(1024)
    backward_long_rows(const __grid_constant__ NormBackwardArgs args) {
  using Item = Pack<T, kWidth>;
  __shared__ float2 scratch[2][kMostWarps];
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
    team.wait();
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

constexpr int kPartTeams = 32;

/// Adds the partial sums of every column up in a fixed order. Block row 0 makes grad_weight, block
/// row 1 grad_bias.
template <typename T>
__global__ void __launch_bounds__(kWarp* kPartTeams)
    add_partials(const Partials partials, int parts, int columns, T* grad_weight, T* grad_bias) {
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
  const int mine = static_cast<int>(blockIdx.x) * kWarp + y;
  if (x == 0 && mine < columns) to[mine] = narrow<T>(sum);
}

}  // namespace xpuruntime::cuda_raw::norm

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_backward_sums.cuh"
#include "cuda_raw/norm/norm_device.cuh"

namespace xpuruntime::cuda_raw::norm {

__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

constexpr int kMaxStages = 4;

/// Waits until at most `left` of this thread's copy groups are under way: 0 to kMaxStages - 1.
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

/// Hides that an index is the same in every turn of a loop, where keeping what it leads to would
/// need too many registers.
__device__ __forceinline__ int again(int index) {
  asm volatile("" : "+r"(index));
  return index;
}

/// How a block of backward_rows is built: kTeams teams of kWarps warps, each team on a row of its
/// own, kElements elements of the row a thread.
template <int kElementsEach, int kWarpsEach, int kTeamsEach, int kBlocksEach>
struct Shape {
  static constexpr int kElements = kElementsEach;
  static constexpr int kWarps = kWarpsEach;
  static constexpr int kTeams = kTeamsEach;
  static constexpr int kThreads = kWarps * kWarp;
  /// Blocks at once on a multiprocessor: as many as leave each thread the registers it needs. With
  /// teams of several warps, 4 at most: barriers chosen at run time take all 16 of a block.
  static constexpr int kBlocks = kBlocksEach;
};

/// The sums of two values over all threads of a team. The two halves of a warp add up one value
/// each, so that half of the exchanges are saved.
template <int kWarps, int kTeams>
__device__ __forceinline__ float2 sum_team(float first, float second, int team, float2* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool lower = lane < kWarp / 2;
  float sum = lower ? first : second;
  sum += __shfl_xor_sync(0xffffffffU, lower ? second : first, kWarp / 2);
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset >>= 1) {
    sum += __shfl_xor_sync(0xffffffffU, sum, offset);
  }
  if constexpr (kWarps == 1) {
    return make_float2(__shfl_sync(0xffffffffU, sum, 0), __shfl_sync(0xffffffffU, sum, kWarp / 2));
  } else {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane % (kWarp / 2) == 0) reinterpret_cast<float*>(scratch + warp)[lane / (kWarp / 2)] = sum;
    if constexpr (kTeams == 1) {
      __syncthreads();
    } else {  // leaves the other teams alone
      asm volatile("barrier.sync.aligned %0, %1;" ::"r"(team + 1), "n"(kWarps * kWarp) : "memory");
    }
    float2 all = scratch[0];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      all.x += scratch[other].x;
      all.y += scratch[other].y;
    }
    return all;
  }
}

/// Adds the sums of the teams of a block up and writes them as one row of the partial sums. `room`
/// has kTeams floats a column.
template <typename Shape, int kWidth, int kPacks>
__device__ __forceinline__ void write_partial(const float (&sums)[kPacks][kWidth], int columns,
                                              float* to, float* room) {
  __syncthreads();
  const int packs = columns / kWidth;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int index = p * Shape::kThreads + static_cast<int>(threadIdx.x);
    if (index >= packs) break;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // Neighbouring threads on neighbouring words: no bank is asked twice.
      room[(static_cast<int>(threadIdx.y) * kWidth + i) * packs + index] = sums[p][i];
    }
  }
  __syncthreads();
  const int thread =
      static_cast<int>(threadIdx.y) * Shape::kThreads + static_cast<int>(threadIdx.x);
  for (int cell = thread; cell < columns; cell += Shape::kThreads * Shape::kTeams) {
    float sum = room[cell];
#pragma unroll
    for (int team = 1; team < Shape::kTeams; ++team) sum += room[team * columns + cell];
    to[cell] = sum;
  }
}

/// A team of threads a row, which a block takes every (gridDim.x * kTeams)th of. Each thread copies
/// its own packs of coming rows to its own places in shared memory, `stages` rows ahead, so that it
/// has only itself to wait for. One-element packs are read directly.
///
/// The partial sums are in the order of the columns' words as write_partial leaves them: the word
/// of column c is (c % kWidth) * (columns / kWidth) + c / kWidth.
template <typename T, int kWidth, typename Shape, bool kExtra>
__global__ void __launch_bounds__(Shape::kThreads* Shape::kTeams, Shape::kBlocks)
    backward_rows(const __grid_constant__ NormBackwardArgs args, const Partials partials,
                  int stages) {
  using Item = Pack<T, kWidth>;
  constexpr int kPacks = Shape::kElements / kWidth;
  constexpr int kThreads = Shape::kThreads;
  constexpr bool kCopied = sizeof(Item) == kAccessBytes;
  // Whether a thread keeps its part of the row in registers from the sums to the result, and its
  // part of the weight for all rows; otherwise they are read again where they lie.
  constexpr bool kHeld = Shape::kElements <= 16;
  // A stage is free for a coming row once nothing is read from it any more.
  constexpr bool kFreeEarly = kHeld && !kExtra;
  constexpr int kInputs = kExtra ? 3 : 2;
  constexpr int kStageItems = kInputs * kPacks * kThreads * Shape::kTeams;
  extern __shared__ uint4 shared[];
  __shared__ float2 scratch[2][Shape::kTeams][Shape::kWarps];

  const int team = static_cast<int>(threadIdx.y);
  const int first = static_cast<int>(threadIdx.x);
  const int packs = static_cast<int>(args.columns) / kWidth;
  const float scale = 1.0F / static_cast<float>(args.columns);
  const bool weight_is_fp32 = args.weight_type == NormType::fp32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Shape::kTeams;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * Shape::kTeams + team;
  Item* const mine = reinterpret_cast<Item*>(shared) + team * kInputs * kPacks * kThreads + first;

  auto copy_input = [&](const void* tensor, std::int64_t stride, std::int64_t from_row, Item* to) {
    const Item* from = row_of<T, kWidth>(tensor, from_row, stride) + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kThreads + first < packs) copy_async(to + p * kThreads, from + p * kThreads);
    }
  };
  auto copy_row = [&](std::int64_t from_row, Item* to) {
    if (from_row < args.rows) {
      copy_input(args.grad_y, args.grad_y_row_stride, from_row, to);
      copy_input(args.x, args.x_row_stride, from_row, to + kPacks * kThreads);
      if constexpr (kExtra) {
        copy_input(args.grad_sum, args.grad_sum_row_stride, from_row, to + 2 * kPacks * kThreads);
      }
    }
    end_copy_group();
  };
  auto fetch = [&](const Item* lie, int input, int p) {
    if constexpr (kCopied) {
      return lie[(input * kPacks + p) * kThreads];
    } else {
      const int at = p * kThreads + first;
      if (input == 0) return row_of<T, kWidth>(args.grad_y, row, args.grad_y_row_stride)[at];
      if (input == 1) return row_of<T, kWidth>(args.x, row, args.x_row_stride)[at];
      return row_of<T, kWidth>(args.grad_sum, row, args.grad_sum_row_stride)[at];
    }
  };

  float weight_sums[kPacks][kWidth] = {};
  float bias_sums[kPacks][kWidth] = {};
  float weights[kHeld ? kPacks : 1][kWidth];
  if constexpr (kHeld) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * kThreads + first;
      if (index < packs) {
        load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F, index, weights[p]);
      }
    }
  }
  float mean = 0.0F;
  float rstd = 0.0F;
  if (row < args.rows) {
    rstd = args.rstd[row];
    if (!args.rms) mean = args.mean[row];
  }
  if constexpr (kCopied) {
    for (int stage = 0; stage < stages; ++stage) {
      copy_row(row + stage * step, mine + stage * kStageItems);
    }
  }
  int stage = 0;
  int turn = 0;
  // The teams of a block take equally many turns, so that they meet at the same barriers; one that
  // is past the last row holds no pack.
  for (; row - team < args.rows; row += step) {
    const int held_packs = row < args.rows ? packs : 0;
    Item* const lie = mine + stage * kStageItems;
    float weighted[kHeld ? kPacks : 1][kWidth];
    float xhat[kHeld ? kPacks : 1][kWidth];
    if constexpr (kCopied) wait_for_copies(stages - 1);
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
      const int index = p * kThreads + first;
      const int at = kHeld ? p : 0;
      if (index >= held_packs) break;
      float g[kWidth];
      float value[kWidth];
      unpack(fetch(lie, 0, p), g);
      unpack(fetch(lie, 1, p), value);
      if constexpr (!kHeld) {
        load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F, again(index), weights[at]);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        xhat[at][i] = (value[i] - mean) * rstd;
        weighted[at][i] = g[i] * weights[at][i];
        average += weighted[at][i];
        projection += weighted[at][i] * xhat[at][i];
        weight_sums[p][i] += g[i] * xhat[at][i];
        bias_sums[p][i] += g[i];
      }
    }
    if constexpr (kCopied && kFreeEarly) copy_row(row + stages * step, lie);
    const float2 sums =
        sum_team<Shape::kWarps, Shape::kTeams>(average, projection, team, scratch[turn][team]);
    turn ^= 1;
    Item* const grad_x = row_of<T, kWidth>(args.grad_x, row, args.grad_x_row_stride) + first;
    const float minus_average = args.rms ? 0.0F : -sums.x * scale * rstd;
    const float minus_projection = -sums.y * scale * rstd;

#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int index = p * kThreads + first;
      const int at = kHeld ? p : 0;
      if (index >= held_packs) break;
      if constexpr (!kHeld) {
        float g[kWidth];
        float value[kWidth];
        unpack(fetch(lie, 0, p), g);
        unpack(fetch(lie, 1, p), value);
        load_weight<T, kWidth>(args.weight, weight_is_fp32, 1.0F, again(index), weights[at]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          xhat[at][i] = (value[i] - mean) * rstd;
          weighted[at][i] = g[i] * weights[at][i];
        }
      }
      float result[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        result[i] = rstd * weighted[at][i] + (minus_projection * xhat[at][i] + minus_average);
      }
      if constexpr (kExtra) {
        float more[kWidth];
        unpack(fetch(lie, 2, p), more);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result[i] += more[i];
      }
      store_once(grad_x + p * kThreads, pack_up<T, kWidth>(result));
    }
    if constexpr (kCopied) {
      if constexpr (!kFreeEarly) copy_row(row + stages * step, lie);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    mean = next_mean;
    rstd = next_rstd;
  }

  if constexpr (kCopied) wait_for_copies(0);
  auto* room = reinterpret_cast<float*>(shared);
  const int columns = static_cast<int>(args.columns);
  const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * columns;
  if (partials.weight != nullptr) {
    write_partial<Shape>(weight_sums, columns, partials.weight + part, room);
  }
  if (partials.bias != nullptr) {
    write_partial<Shape>(bias_sums, columns, partials.bias + part, room);
  }
}

}  // namespace xpuruntime::cuda_raw::norm

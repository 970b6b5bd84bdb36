// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_raw/attention/flash_forward_mask.cuh"

// Which block computes what, and when.
namespace xpuruntime::cuda_raw::hopper {

/// What a launch works on; q, k and v come as tensor maps.
struct Problem {
  void* out;
  std::int64_t out_strides[3];
  float* lse;
  int head_dim;
  int heads;
  int heads_per_kv_head;
  int q_length;
  int kv_length;
  int row_blocks;
  int items;            // row_blocks * batch * heads
  int sections;         // 1 or even; see item_at
  int heads_a_section;  // of batch * heads
  int causal;
  int diagonal;  // with causal, row r attends to columns below r + diagonal
  float scale_log2;
  FlashExtras extras;
};

/// `kDim` is head_dim rounded up to what is multiplied; `kKeys` rows of k and v make a tile.
template <int kDim, int kComputeGroups, int kKeys>
struct Shape {
  static constexpr int kHeadDim = kDim;
  static constexpr int kGroups = kComputeGroups;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kColumns = kKeys;
  static constexpr int kStages = 2;
  static constexpr int kPanels = (kDim + 63) / 64;
  // Whether a warpgroup's own softmax runs under its own products too. Of three warpgroups two can
  // always do it for each other, and have no registers to spare.
  static constexpr bool kOverlap = kGroups == 2;
  static constexpr int kLoaderRegisters = kGroups == 3 ? 32 : 24;
  static constexpr int kGroupRegisters = kGroups == 3 ? 160 : 240;
};

struct Item {
  int batch;
  int head;
  int bh;
  int first_row;
  int tiles;  // of keys, at least one; the last one comes first
};

/// The index-th item. Sections of heads, whose keys and values stay in the L2 cache together, come
/// one after another. The longest row blocks of causal heads come first in the last section and in
/// every second one before it, last in the others: with sections of one size, the sum of what a
/// block gets from each two of them is the same for all blocks.
template <typename S>
__device__ __forceinline__ Item item_at(const Problem& problem, int index) {
  const int section_items = problem.heads_a_section * problem.row_blocks;
  const int section = index / section_items;
  const int first_head = section * problem.heads_a_section;
  const int all_heads = problem.items / problem.row_blocks;
  const int heads = min(problem.heads_a_section, all_heads - first_head);
  const int in_section = index - section * section_items;
  const int block = in_section / heads;
  const bool backward = problem.causal && (problem.sections - section) % 2 == 1;
  Item item;
  item.bh = first_head + in_section - block * heads;
  item.batch = item.bh / problem.heads;
  item.head = item.bh - item.batch * problem.heads;
  item.first_row = (backward ? problem.row_blocks - 1 - block : block) * S::kRows;
  int limit = problem.kv_length;
  if (problem.causal) {
    limit = min(limit, min(item.first_row + S::kRows, problem.q_length) - 1 + problem.diagonal);
  }
  item.tiles = limit <= 0 ? 1 : (limit + S::kColumns - 1) / S::kColumns;
  return item;
}

/// The index of this block's item in its round-th turn, or -1 after the last. In a single section,
/// where items only get shorter, every other round runs backward, which evens out what the blocks
/// get.
__device__ __forceinline__ int index_in_round(const Problem& problem, int round) {
  const int blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x);
  const bool backward = problem.sections == 1 && round % 2 == 1;
  const int index = round * blocks + (backward ? blocks - 1 - block : block);
  return index < problem.items ? index : -1;
}

}  // namespace xpuruntime::cuda_raw::hopper

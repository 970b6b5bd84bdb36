// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/attention/flash_backward_params.cuh"

namespace xpuruntime::cuda_raw {

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float2 load_shared_pair(std::uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(v.x), "=f"(v.y)
               : "r"(address)
               : "memory");
  return v;
}

/// Adds four adjacent floats in device memory, aligned to 16 bytes.
__device__ __forceinline__ void add_global(float* target, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(target), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(target, a);
  atomicAdd(target + 1, b);
  atomicAdd(target + 2, c);
  atomicAdd(target + 3, d);
#endif
}

/// Which keys a block owns and which query rows see them.
struct FlashBackwardWork {
  int kv_block;
  int batch;
  int kv_head;
  int key0;
  int row_tiles;
  int first_tile;
  int tiles;

  __device__ FlashBackwardWork(const FlashBackwardParams& p, int number, int keys, int rows) {
    // Sections of p.section heads, one after the other; within each the blocks of the first keys,
    // which have the most to do under a causal mask, go first.
    const int kv_heads = static_cast<int>(p.args.kv_heads);
    const int first_head = number / (p.kv_blocks * p.section) * p.section;
    const int in_section = number - first_head * p.kv_blocks;
    const int heads = min(p.section, static_cast<int>(p.args.batch) * kv_heads - first_head);
    kv_block = in_section / heads;
    if (p.args.deterministic) kv_block = p.kv_blocks - 1 - kv_block;
    const int batch_head = first_head + in_section % heads;
    batch = batch_head / kv_heads;
    kv_head = batch_head % kv_heads;
    key0 = kv_block * keys;
    row_tiles = (p.q_length + rows - 1) / rows;
    first_tile = p.args.causal ? max(0, key0 - p.shift) / rows : 0;
    tiles = max(0, row_tiles - first_tile) * p.group;
  }
};

/// The number of this block's work, the same in all its threads. In a repeatable order a turn is
/// waited for only from blocks with smaller numbers, so that numbers are given out as blocks start:
/// those run already. `scratch` is a word of shared memory that is free.
__device__ inline int flash_backward_number(const FlashBackwardParams& p, std::uint32_t scratch) {
  if (!p.args.deterministic) return static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    store_shared(scratch, static_cast<std::uint32_t>(atomicAdd(p.ticket, 1)));
  }
  __syncthreads();
  const int number = static_cast<int>(load_shared_word(scratch));
  __syncthreads();
  return number;
}

/// The place of one block's addition to the sums of a tile of grad_q rows. Where the order is to be
/// repeatable, blocks of later keys go first: under a causal mask they reach a tile first.
class FlashBackwardTurn {
 public:
  /// `rows` from row0 on are the tile, `keys` what a block owns. `part` is 0, or the number of one
  /// of several disjoint parts of the tile that are added on their own: up to rows / 32.
  __device__ FlashBackwardTurn(const FlashBackwardParams& p, int batch, int head, int row0,
                               int rows, int keys, int kv_block, int part) {
    int last = p.kv_blocks - 1;
    if (p.args.causal) last = min(last, (row0 + rows - 1 + p.shift) / keys);
    place_ = last - kv_block;
    turn_ = p.turns + (static_cast<std::int64_t>(batch) * p.heads + head) * (p.rows / 32) +
            row0 / 32 + part;
  }

  /// Until the blocks before have added. One thread calls it, then the block synchronises.
  __device__ void wait() const {
    int now = 0;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(turn_) : "memory");
    } while (now != place_);
  }

  /// After every thread of the block has added, fenced and synchronised. One thread calls it.
  __device__ void pass() const {
    asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(turn_), "r"(place_ + 1) : "memory");
  }

 private:
  int* turn_;
  int place_;
};

}  // namespace xpuruntime::cuda_raw

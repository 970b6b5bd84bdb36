// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda_raw/gemm/skinny_matmul_tile.cuh"

// Skinny matmul for compute capability 9.0 and operands whose rows start on 16 bytes: one warp of
// each block keeps a ring of chunks in flight through the copy engine, the others multiply.
namespace xpuruntime::cuda_raw::skinny {

/// The operands as the copy engine sees them, in four dimensions: (column in a panel, row, panel,
/// batch) with all panels of a chunk in one box where the row length is a multiple of a panel, else
/// (column, row, 1, batch) with one panel a box.
struct Maps {
  CUtensorMap a;
  CUtensorMap b;
  bool a_by_panels, b_by_panels;
  bool a_batched, b_batched;  // else all of the batch read the same one
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// Copies a tile of which `panels` panels begin at column x0 of row `row`, panel_bytes each.
__device__ __forceinline__ void copy_tile(std::uint32_t to, const CUtensorMap* map, bool by_panels,
                                          int x0, int row, int batch, int panels, int panel_bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
  if (by_panels) {
    copy_box(to, map, 0, row, x0 / kPanel, batch, barrier, policy);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < panels; ++i) {
    copy_box(to + i * panel_bytes, map, x0 + i * kPanel, row, 0, batch, barrier, policy);
  }
}

/// The one thread that copies.
template <typename S>
__device__ __forceinline__ void copy_chunks(const Problem& p, const Maps& maps, int begin, int end,
                                            int first_column, std::uint32_t full,
                                            std::uint32_t empty, std::uint32_t ring) {
  const int batch_of_a = maps.a_batched ? static_cast<int>(blockIdx.y) : 0;
  const int batch_of_b = maps.b_batched ? static_cast<int>(blockIdx.y) : 0;
  const std::uint64_t once = evict_first_policy();
  const std::uint64_t often = evict_normal_policy();
  const auto copy_b = [&](int start, int stage) {
    barrier_expect(full + 8 * stage, S::kBytesB + 2 * p.m * S::kChunk);
    copy_tile(ring + stage * S::kStageBytes, &maps.b, maps.b_by_panels,
              S::kTransposed ? start : first_column, S::kTransposed ? first_column : start,
              batch_of_b, S::kRowLength / kPanel, 2 * S::kRows * kPanel, full + 8 * stage, once);
  };

  prefetch_map(&maps.a);
  prefetch_map(&maps.b);
  // Chunks of b that are already on their way when the kernels ahead are finished.
  int early = 0;
  if (p.weights_are_constant) {
#pragma unroll 1
    for (; early < p.stages && begin + early * S::kChunk < end; ++early) {
      copy_b(begin + early * S::kChunk, early);
    }
  }
  wait_for_earlier_kernels();
  int stage = 0;
  int parity = 1;
#pragma unroll 1
  for (int start = begin; start < end; start += S::kChunk) {
    if (--early < 0) {
      barrier_wait(empty + 8 * stage, parity);
      copy_b(start, stage);
    }
    copy_tile(ring + stage * S::kStageBytes + S::kBytesB, &maps.a, maps.a_by_panels, start, 0,
              batch_of_a, S::kChunk / kPanel, 2 * p.m * kPanel, full + 8 * stage, often);
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads + 32, 1)
    multiply_bulk(const __grid_constant__ Problem p, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char memory[];
  let_later_kernels_start();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int rank = p.split == 1 ? 0 : cluster_rank();
  const int first_column =
      static_cast<int>(blockIdx.x / static_cast<unsigned>(p.split)) * S::kColumns;
  int begin, end;
  part_of_k<S>(p, rank, begin, end);

  const std::uint32_t full = shared_address(memory);
  const std::uint32_t empty = full + 8 * kMaxStages;
  float4* receive = reinterpret_cast<float4*>(memory + kBarrierBytes);
  unsigned char* ring = memory + p.ring_offset;
  if (threadIdx.x == S::kThreads) {
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, S::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (p.split > 1) cluster_arrive();

  if (warp == S::kWarps) {
    if (threadIdx.x == S::kThreads) {
      copy_chunks<S>(p, maps, begin, end, first_column, full, empty, shared_address(ring));
    }
    if (p.split > 1) {
      __syncwarp();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }
  if (S::kTransposed && p.prefetch > 0) {
    // A warp's lanes take rows far apart, as each copy keeps its lane busy for a while.
    const int row = warp + static_cast<int>(threadIdx.x) % 32 * S::kWarps;
    if (row < min(S::kColumns, p.n - first_column)) {
      const T* b = static_cast<const T*>(p.b) + blockIdx.y * p.b_batch;
      prefetch_bulk(b + (first_column + row) * p.ldb + begin,
                    min(2 * (end - begin), p.prefetch) & ~15, evict_first_policy());
    }
  }
  Accumulator<S> acc = {};
  int stage = 0;
  int parity = 0;
#pragma unroll 1
  for (int start = begin; start < end; start += S::kChunk) {
    const std::uint32_t place = shared_address(ring) + stage * S::kStageBytes;
    barrier_wait(full + 8 * stage, parity);
    multiply_chunk<T, S>(acc, place, place + S::kBytesB, end - start, p.m);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wait_for_earlier_kernels();      // they may read what is written now
  synchronize_first(S::kThreads);  // every chunk has been read
  reduce_and_write<T, S>(p, acc, reinterpret_cast<float4*>(ring), receive, first_column, rank);
#endif
}

}  // namespace xpuruntime::cuda_raw::skinny

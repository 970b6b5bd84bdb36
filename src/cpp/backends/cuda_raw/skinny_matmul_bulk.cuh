// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda_raw/skinny_matmul_tile.cuh"

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

/// Calls visit(x, z, offset) for each box of `panels` panels from `start` on: where it is in the
/// map and in shared memory.
template <typename Visit>
__device__ __forceinline__ void for_boxes(bool by_panels, int start, int panels, int panel_bytes,
                                          Visit visit) {
  if (by_panels) {
    visit(0, start / kPanel, 0);
  } else {
    for (int i = 0; i < panels; ++i) visit(start + i * kPanel, 0, i * panel_bytes);
  }
}

/// The one thread that copies.
template <typename S>
__device__ __forceinline__ void copy_chunks(const Problem& p, const Maps& maps, int begin, int end,
                                            int first_column, std::uint32_t full,
                                            std::uint32_t empty, std::uint32_t ring) {
  const int chunks = (end - begin + S::kChunk - 1) / S::kChunk;
  const int batch_of_a = maps.a_batched ? static_cast<int>(blockIdx.y) : 0;
  const int batch_of_b = maps.b_batched ? static_cast<int>(blockIdx.y) : 0;
  const std::uint64_t once = (p.hints & 8) ? evict_normal_policy() : evict_first_policy();
  const std::uint64_t often = evict_normal_policy();

  const auto boxes_of_b = [&](int chunk, auto visit) {
    const int start = begin + chunk * S::kChunk;
    const int row = S::kTransposed ? first_column : start;
    const int column = S::kTransposed ? start : first_column;
    for_boxes(maps.b_by_panels, column, S::kRowLength / kPanel, 2 * S::kRows * kPanel,
              [&](int x, int z, int offset) { visit(x, row, z, offset); });
  };
  const auto copy_b = [&](int chunk, int stage) {
    barrier_arrive_expecting(full + 8 * stage,
                             S::kBytesB + ((p.hints & 32) ? 0 : 2 * p.m * S::kChunk));
    boxes_of_b(chunk, [&](int x, int y, int z, int offset) {
      copy_box(ring + stage * S::kStageBytes + offset, &maps.b, x, y, z, batch_of_b,
               full + 8 * stage, once);
    });
  };
  const auto copy_a = [&](int chunk, int stage) {
    const std::uint32_t place = ring + stage * S::kStageBytes + S::kBytesB;
    for_boxes(maps.a_by_panels, begin + chunk * S::kChunk, S::kChunk / kPanel, 2 * p.m * kPanel,
              [&](int x, int z, int offset) {
                copy_box(place + offset, &maps.a, x, 0, z, batch_of_a, full + 8 * stage, often);
              });
  };

  const int ahead = min(chunks, p.stages);
  if (p.weights_are_constant) {
    for (int chunk = 0; chunk < ahead; ++chunk) copy_b(chunk, chunk);
  } else if (p.hints & 1) {
    for (int chunk = 0; chunk < ahead; ++chunk) {
      boxes_of_b(chunk, [&](int x, int y, int z, int) {
        prefetch_box(&maps.b, x, y, z, batch_of_b, once);
      });
    }
  }
  prefetch_map(&maps.a);
  prefetch_map(&maps.b);
  wait_for_earlier_kernels();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = chunk % p.stages;
    if (chunk >= p.stages) barrier_wait(empty + 8 * stage, (chunk / p.stages - 1) % 2);
    if (chunk >= ahead || !p.weights_are_constant) copy_b(chunk, stage);
    if (!(p.hints & 32)) copy_a(chunk, stage);
  }
  if (p.hints & 4) let_later_kernels_start();
}

#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads + 32, 1)
    multiply_bulk(const __grid_constant__ Problem p, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char memory[];
  if (p.hints & 2) let_later_kernels_start();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int rank = p.split == 1 ? 0 : cluster_rank();
  const std::int64_t tile = blockIdx.x / static_cast<unsigned>(p.split);
  const int first_column = static_cast<int>(tile * S::kColumns);
  int begin, end;
  part_of_k<S>(p, rank, begin, end);

  const std::uint32_t full = shared_address(memory);
  const std::uint32_t empty = full + 8 * kMaxStages;
  float4* receive = reinterpret_cast<float4*>(memory + kBarrierBytes);
  unsigned char* ring = memory + p.ring_offset;
  if (threadIdx.x == S::kThreads) {
    for (int stage = 0; stage < p.stages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, S::kWarps);
    }
    barrier_init_done();
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
  if ((p.hints & 128) && S::kTransposed) {
    const T* b = static_cast<const T*>(p.b) + blockIdx.y * p.b_batch;
    const int lines = (min(end - begin, p.ahead * S::kChunk) * 2 + 127) / 128;
    const int rows = min(S::kColumns, p.n - first_column);
    for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += S::kThreads) {
      prefetch_line(b + (first_column + i / lines) * p.ldb + begin + i % lines * 64);
    }
  }
  if ((p.hints & 16) && S::kTransposed) {
    const T* b = static_cast<const T*>(p.b) + blockIdx.y * p.b_batch;
    const int rows = min(S::kColumns, p.n - first_column);
    const int row =
        static_cast<int>(threadIdx.x / 32) + static_cast<int>(threadIdx.x % 32) * S::kWarps;
    if (row < rows)
      prefetch_bulk(b + (first_column + row) * p.ldb + begin,
                    min(end - begin, p.ahead * S::kChunk) * 2, evict_first_policy());
  }
  Accumulator<S> acc = {};
  const int chunks = (end - begin + S::kChunk - 1) / S::kChunk;
  int stage = 0;
  int parity = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const std::uint32_t place = shared_address(ring) + stage * S::kStageBytes;
    barrier_wait(full + 8 * stage, parity);
    if (!(p.hints & 64))
      multiply_chunk<T, S>(acc, place, place + S::kBytesB, end - begin - chunk * S::kChunk, p.m);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wait_for_earlier_kernels();                        // they may read what is written now
  if (p.split == 1) synchronize_first(S::kThreads);  // every chunk has been read
  reduce_and_write<T, S>(p, acc, receive, first_column, rank);
#endif
}

}  // namespace xpuruntime::cuda_raw::skinny

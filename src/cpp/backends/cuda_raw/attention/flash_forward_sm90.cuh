// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_raw/attention/flash_forward_sm90_plan.cuh"
#include "cuda_raw/attention/flash_forward_sm90_rows.cuh"
#include "cuda_raw/bulk_copy.cuh"
#include "cuda_raw/mma.cuh"
#include "cuda_raw/wgmma.cuh"

// One block on every multiprocessor takes tile after tile of query rows. Its first warpgroup only
// feeds the bulk copy engine; each of the others owns 64 rows of the tile. While the tensor cores
// multiply a warpgroup's next scores and its last weights, it works on the softmax in between, and
// the warpgroups take turns in issuing products, so that one's softmax runs under another's.
namespace xpuruntime::cuda_raw::hopper {

struct TensorMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

template <typename S>
struct Shared {
  alignas(1024) unsigned char q[S::kGroups][S::kPanels][64 * 128];
  alignas(1024) unsigned char k[S::kStages][S::kPanels][S::kColumns * 128];
  alignas(1024) unsigned char v[S::kStages][S::kPanels][S::kColumns * 128];
  std::uint64_t q_full;
  std::uint64_t q_free;
  std::uint64_t k_full[S::kStages];
  std::uint64_t k_free[S::kStages];
  std::uint64_t v_full[S::kStages];
  std::uint64_t v_free[S::kStages];
};

/// Hardware barriers: 0 is __syncthreads.
constexpr int kTurnBarrier = 1;  // + warpgroup: its turn to issue products

/// A slot of a ring of kStages and the parity of its pass.
template <int kStages>
struct Ring {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <typename S>
__device__ __forceinline__ void load_all(Shared<S>& shared, const TensorMaps& maps,
                                         const Problem& problem) {
  constexpr int kQBytes = S::kGroups * S::kPanels * 64 * 128;
  constexpr int kTileBytes = S::kPanels * S::kColumns * 128;
  const std::uint32_t q_full = shared_address(&shared.q_full);
  const std::uint32_t q_free = shared_address(&shared.q_free);
  Ring<S::kStages> ring;
  std::uint32_t q_parity = 0;
  int index = index_in_round(problem, 0);
  for (int round = 1; index >= 0; index = index_in_round(problem, round++)) {
    const Item item = item_at<S>(problem, index);
    const int kv_head = item.head / problem.heads_per_kv_head;
    barrier_wait(q_free, q_parity ^ 1);
    q_parity ^= 1;
    barrier_expect(q_full, kQBytes);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        bulk_load(shared_address(shared.q[group][panel]), &maps.q, panel * 64,
                  item.first_row + group * 64, item.head, item.batch, q_full);
      }
    }
    for (int tile = item.tiles - 1; tile >= 0; --tile) {
      const std::uint32_t k_full = shared_address(&shared.k_full[ring.slot]);
      barrier_wait(shared_address(&shared.k_free[ring.slot]), ring.parity ^ 1);
      barrier_expect(k_full, kTileBytes);
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        bulk_load(shared_address(shared.k[ring.slot][panel]), &maps.k, panel * 64,
                  tile * S::kColumns, kv_head, item.batch, k_full);
      }
      const std::uint32_t v_full = shared_address(&shared.v_full[ring.slot]);
      barrier_wait(shared_address(&shared.v_free[ring.slot]), ring.parity ^ 1);
      barrier_expect(v_full, kTileBytes);
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        bulk_load(shared_address(shared.v[ring.slot][panel]), &maps.v, panel * 64,
                  tile * S::kColumns, kv_head, item.batch, v_full);
      }
      ring.next();
    }
  }
}

template <typename S, bool kBfloat16>
__device__ __forceinline__ void issue_scores(Rows<S>& rows, std::uint64_t q, std::uint64_t k) {
  constexpr int kUnit = 16;  // bytes that a matrix's start counts in
#pragma unroll
  for (int step = 0; step < S::kHeadDim / 16; ++step) {
    const int in_panel = step % 4 * 32;
    wgmma_shared<kBfloat16>(
        rows.score, q + static_cast<unsigned>((step / 4 * 64 * 128 + in_panel) / kUnit),
        k + static_cast<unsigned>((step / 4 * S::kColumns * 128 + in_panel) / kUnit), step > 0);
  }
  wgmma_commit();
}

template <typename S, bool kBfloat16>
__device__ __forceinline__ void issue_out(Rows<S>& rows, std::uint64_t v) {
#pragma unroll
  for (int step = 0; step < S::kColumns / 16; ++step) {
    wgmma_transposed<kBfloat16>(rows.out, rows.weight[step],
                                v + static_cast<unsigned>(step * 16 * 128 / 16));
  }
  wgmma_commit();
}

/// All that one computing warpgroup does. Its work is one stream of tiles across its items: the
/// scores of the next tile, of this item or the next one, are under way with the products of this.
template <typename S, bool kBfloat16, bool kGeneral>
__device__ __forceinline__ void compute_all(Shared<S>& shared, const Problem& problem, int group) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int next_group = group + 1 == S::kGroups ? 0 : group + 1;
  const int warp_offset = group * 64 + thread / 32 * 16;
  const std::uint32_t q_full = shared_address(&shared.q_full);
  const std::uint32_t q_free = shared_address(&shared.q_free);
  constexpr int kTileUnits = S::kPanels * S::kColumns * 128 / 16;
  const std::uint64_t q = wgmma_matrix(shared_address(shared.q[group]), 0);
  const std::uint64_t k = wgmma_matrix(shared_address(shared.k), 0);
  const std::uint64_t v = wgmma_matrix(shared_address(shared.v), S::kColumns * 128);
  const auto release = [&](std::uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };

  Rows<S> rows;
  Ring<S::kStages> k_ring;
  Ring<S::kStages> v_ring;
  std::uint32_t q_parity = 0;
  float rescale[2];

  // The products of the queries with the tile that k_ring is at, and what follows them.
  const auto wait_k = [&](bool new_item) {
    if (new_item) {
      barrier_wait(q_full, q_parity);
      q_parity ^= 1;
    }
    barrier_wait(shared_address(&shared.k_full[k_ring.slot]), k_ring.parity);
  };
  const auto start_scores = [&] {
    wgmma_fence();
    issue_scores<S, kBfloat16>(rows, q, k + static_cast<unsigned>(k_ring.slot * kTileUnits));
  };
  const auto release_k = [&](int tile) {
    release(shared_address(&shared.k_free[k_ring.slot]));
    k_ring.next();
    if (tile == 0) release(q_free);
  };
  const auto start_out = [&] {
    barrier_wait(shared_address(&shared.v_full[v_ring.slot]), v_ring.parity);
    wgmma_fence();
    issue_out<S, kBfloat16>(rows, v + static_cast<unsigned>(v_ring.slot * kTileUnits));
  };
  const auto end_out = [&] {
    wgmma_wait<0>();
    fence_registers(rows.out);
    release(shared_address(&shared.v_free[v_ring.slot]));
    v_ring.next();
  };
  const auto cut_tile = [&](const Item& item, int tile) {
    const int first_column = tile * S::kColumns;
    const int first_row = item.first_row + warp_offset;
    const int limit =
        problem.causal ? min(problem.kv_length, first_row + problem.diagonal) : problem.kv_length;
    if (first_column + S::kColumns <= limit) return;
    int end0 = problem.kv_length;
    int end1 = end0;
    if (problem.causal) {
      end0 = min(end0, first_row + lane / 4 + problem.diagonal);
      end1 = min(end1, first_row + lane / 4 + 8 + problem.diagonal);
    }
    mask_columns(rows, end0 - first_column - lane % 4 * 2, end1 - first_column - lane % 4 * 2);
  };
  const Dropout dropout = kGeneral ? Dropout(problem.extras) : Dropout();
  const float factor = kGeneral ? 1.0f : problem.scale_log2;
  const auto softmax_tile = [&](const Item& item, int tile) {
    const int row = item.first_row + warp_offset + lane / 4;
    const int column = tile * S::kColumns + lane % 4 * 2;
    if constexpr (kGeneral) {
#pragma unroll
      for (int i = 0; i < S::kColumns / 2; ++i) rows.score[i] *= problem.scale_log2;
      if (problem.extras.mask_kind != kMaskNone) {
        const std::int64_t head = item.batch * problem.extras.mask_strides[0] +
                                  item.head * problem.extras.mask_strides[1];
        mask_scores<S::kColumns / 2, kBfloat16>(rows.score, problem.extras, head, row, column,
                                                problem.q_length, problem.kv_length);
      }
    }
    cut_tile(item, tile);
    online_softmax(rows, factor, rescale);
    if constexpr (kGeneral) {
      if (dropout.threshold != 0) {
        drop_weights<S::kColumns / 2>(rows.score, dropout, item.bh, row, column);
      }
    }
  };
  const auto clear_sums = [&] {
    rows.top[0] = rows.top[1] = -INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
  };
  const auto clear_out = [&] {
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 2; ++i) rows.out[i] = 0.0f;
  };

  if (group == S::kGroups - 1) group_arrive(kTurnBarrier, 256);
  int round = 0;
  Item item = item_at<S>(problem, index_in_round(problem, round));
  int tile = item.tiles - 1;
  clear_sums();
  clear_out();
  wait_k(true);
  start_scores();
  wgmma_wait<0>();
  fence_registers(rows.score);
  release_k(tile);
  softmax_tile(item, tile);
  pack_weights<S, kBfloat16>(rows);

  for (;;) {
    const bool ends = tile == 0;
    Item next = item;
    --tile;
    if (ends) {
      const int index = index_in_round(problem, ++round);
      if (index < 0) break;
      next = item_at<S>(problem, index);
      tile = next.tiles - 1;
    }
    wait_k(ends);
    group_sync(kTurnBarrier + group, 256);
    start_scores();
    start_out();
    group_arrive(kTurnBarrier + next_group, 256);
    wgmma_wait<1>();
    fence_registers(rows.score);
    release_k(tile);
    const float tops[2] = {rows.top[0], rows.top[1]};
    const float sums[2] = {rows.sum[0], rows.sum[1]};
    if (ends) clear_sums();
    if constexpr (!S::kOverlap) end_out();
    softmax_tile(next, tile);
    fence_registers(rows.score);
    // The wait stands in both branches, which all warps of the group take alike: a block of code
    // ends before it, and the compiler, which sees no reason against it, would otherwise wait ahead
    // of the softmax.
    if (ends) {
      if constexpr (S::kOverlap) end_out();
      pack_weights<S, kBfloat16>(rows);
      finish<S, kBfloat16>(problem, item, rows.out, tops, sums, factor, dropout.keep_scale,
                           item.first_row + warp_offset);
      clear_out();
      item = next;
    } else {
      if constexpr (S::kOverlap) end_out();
      pack_weights<S, kBfloat16>(rows);
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 2; ++i) rows.out[i] *= rescale[i / 2 % 2];
      }
    }
  }
  start_out();
  end_out();
  finish<S, kBfloat16>(problem, item, rows.out, rows.top, rows.sum, factor, dropout.keep_scale,
                       item.first_row + warp_offset);
  if (group == 0) group_sync(kTurnBarrier, 256);
}

/// kGeneral: with a mask, dropout or a scale that is not positive.
template <typename S, bool kBfloat16, bool kGeneral>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward(const __grid_constant__ TensorMaps maps, const __grid_constant__ Problem problem) {
  extern __shared__ unsigned char raw[];
  const std::uint32_t start = shared_address(raw);
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(raw + ((start + 1023) / 1024 * 1024 - start));
  if (threadIdx.x == 0) {
    constexpr int kWarps = S::kGroups * 4;
    barrier_init(shared_address(&shared.q_full), 1);
    barrier_init(shared_address(&shared.q_free), kWarps);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(shared_address(&shared.k_full[i]), 1);
      barrier_init(shared_address(&shared.v_full[i]), 1);
      barrier_init(shared_address(&shared.k_free[i]), kWarps);
      barrier_init(shared_address(&shared.v_free[i]), kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(S::kLoaderRegisters));
    if (threadIdx.x == 0) load_all(shared, maps, problem);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(S::kGroupRegisters));
    compute_all<S, kBfloat16, kGeneral>(shared, problem, group - 1);
  }
}

}  // namespace xpuruntime::cuda_raw::hopper

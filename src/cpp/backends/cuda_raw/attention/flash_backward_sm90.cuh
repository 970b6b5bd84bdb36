// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda_raw/attention/flash_backward_params.cuh"
#include "cuda_raw/attention/flash_backward_work.cuh"
#include "cuda_raw/bulk_copy.cuh"
#include "cuda_raw/mma.cuh"
#include "cuda_raw/wgmma.cuh"

namespace xpuruntime::cuda_raw {

/// A block owns 128 keys, 64 in each of two warpgroups that compute; a third one has the copy
/// engine bring the rows of q and grad_out, kRows at a time, two stages deep. P and dS stay in
/// registers for grad_v and grad_k. dS also goes through shared memory for grad_q, whose 64 x 64
/// pieces the two groups share: halves of the columns (128 columns) or of the rows (64 columns).
template <int kColumnsOf>
struct FlashBackwardSm90Shape {
  static constexpr int kColumns = kColumnsOf;
  static constexpr int kRows = kColumns == 128 ? 64 : 128;
  static constexpr int kKeys = 128;
  static constexpr int kThreads = 384;
  static constexpr int kPanels = kColumns / 64;
  static constexpr int kKeyPanel = kKeys * 128;  ///< bytes of 64 columns of k or v, or rows of dS
  static constexpr int kRowPanel = kRows * 128;
  static constexpr int kKeyBytes = kPanels * kKeyPanel;
  static constexpr int kRowBytes = kPanels * kRowPanel;
  static constexpr int kScoreBytes = kRows / 64 * kKeyPanel;
  static constexpr int kV = kKeyBytes;
  static constexpr int kQ = kV + kKeyBytes;
  static constexpr int kGradOut = kQ + 2 * kRowBytes;
  static constexpr int kScoreGrad = kGradOut + 2 * kRowBytes;
  static constexpr int kLse = kScoreGrad + 2 * kScoreBytes;
  static constexpr int kDelta = kLse + 2 * kRows * 4;
  static constexpr int kBarriers = kDelta + 2 * kRows * 4;
  static constexpr int kKeysReady = kBarriers;
  static constexpr int kQReady = kBarriers + 8;
  static constexpr int kGradOutReady = kBarriers + 24;
  static constexpr int kStageFree = kBarriers + 40;
  static constexpr int kTicket = kBarriers + 56;
  static constexpr int kBytes = kBarriers + 64;
};

struct FlashBackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap grad_out;
};

/// Contiguous bytes, a multiple of 16, to shared memory, completing on `barrier`.
__device__ __forceinline__ void bulk_load_bytes(std::uint32_t to, const void* from, int bytes,
                                                std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a,
                                               std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <typename Shape>
__device__ void flash_backward_fetch(const FlashBackwardParams& p, const FlashBackwardMaps& maps,
                                     const FlashBackwardWork& work, std::uint32_t shared) {
  const std::uint32_t keys_ready = shared + Shape::kKeysReady;
  barrier_expect(keys_ready, 2 * Shape::kKeyBytes);
  for (int panel = 0; panel < Shape::kPanels; ++panel) {
    bulk_load(shared + panel * Shape::kKeyPanel, &maps.k, panel * 64, work.key0, work.kv_head,
              work.batch, keys_ready);
    bulk_load(shared + Shape::kV + panel * Shape::kKeyPanel, &maps.v, panel * 64, work.key0,
              work.kv_head, work.batch, keys_ready);
  }
  int head = work.kv_head * p.group;
  int tile = work.first_tile;
  for (int step = 0; step < work.tiles; ++step) {
    const int stage = step & 1;
    const int row0 = tile * Shape::kRows;
    const std::int64_t values =
        (static_cast<std::int64_t>(work.batch) * p.heads + head) * p.rows + row0;
    barrier_wait(shared + Shape::kStageFree + 8 * stage,
                 static_cast<std::uint32_t>(step / 2 & 1) ^ 1);
    const std::uint32_t q_ready = shared + Shape::kQReady + 8 * stage;
    const std::uint32_t grad_out_ready = shared + Shape::kGradOutReady + 8 * stage;
    barrier_expect(q_ready, Shape::kRowBytes + Shape::kRows * 4);
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      bulk_load(shared + Shape::kQ + stage * Shape::kRowBytes + panel * Shape::kRowPanel, &maps.q,
                panel * 64, row0, head, work.batch, q_ready);
    }
    bulk_load_bytes(shared + Shape::kLse + stage * Shape::kRows * 4, p.lse + values,
                    Shape::kRows * 4, q_ready);
    barrier_expect(grad_out_ready, Shape::kRowBytes + Shape::kRows * 4);
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      bulk_load(shared + Shape::kGradOut + stage * Shape::kRowBytes + panel * Shape::kRowPanel,
                &maps.grad_out, panel * 64, row0, head, work.batch, grad_out_ready);
    }
    bulk_load_bytes(shared + Shape::kDelta + stage * Shape::kRows * 4, p.delta + values,
                    Shape::kRows * 4, grad_out_ready);
    if (++tile == work.row_tiles) {
      tile = work.first_tile;
      ++head;
    }
  }
}

template <bool kBfloat16, int kCount>
__device__ __forceinline__ void store_keys_sm90(std::uint16_t* target, std::int64_t row_stride,
                                                const float (&sums)[kCount], float factor,
                                                int column, int key, int keys, int head_dim) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int at = key + 8 * (i & 1);
    const int to = column + i / 2 * 8;
    if (at < keys && to < head_dim) {
      *reinterpret_cast<std::uint32_t*>(target + at * row_stride + to) =
          pack<kBfloat16>(sums[2 * i] * factor, sums[2 * i + 1] * factor);
    }
  }
}

template <bool kBfloat16, typename Shape>
__device__ void flash_backward_compute(const FlashBackwardParams& p, const FlashBackwardWork& work,
                                       std::uint32_t shared) {
  constexpr int kRows = Shape::kRows;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  const int group = __shfl_sync(~0U, thread / 128, 0);
  const int warp = thread % 128 / 32;
  const int lane = thread & 31;
  const int quad = lane >> 2;
  const int pair = 2 * (lane & 3);
  const int key = work.key0 + group * 64 + warp * 16 + quad;

  float grad_k[Shape::kColumns / 2] = {};
  float grad_v[Shape::kColumns / 2] = {};

  // Descriptors of matrices at byte `offset` of shared memory: their upper halves are all the same.
  const auto matrix = [&](std::uint32_t offset, std::uint32_t panel_bytes) {
    constexpr std::uint64_t kUpper = (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32);
    return kUpper | (((shared + offset) >> 4) + (panel_bytes << 12));
  };
  const std::uint32_t key_rows = static_cast<std::uint32_t>(group * 64 * 128);
  const std::uint32_t half = static_cast<std::uint32_t>(group * Shape::kKeyPanel);
  const auto along = [](int c, int panel_bytes) {
    return static_cast<std::uint32_t>(c / 4 * panel_bytes + c % 4 * 32);
  };
  const std::uint32_t score_store =
      shared + Shape::kScoreGrad +
      static_cast<std::uint32_t>((group * 64 + warp * 16 + (lane & 15)) * 128 +
                                 (((lane >> 4) ^ (lane & 7)) << 4));

  // to = rows of k or v times those of q or grad_out, transposed.
  const auto multiply_rows = [&](float (&to)[kRows / 2], std::uint32_t keys, std::uint32_t rows) {
    wgmma_shared_first<kBfloat16>(to, matrix(keys + key_rows, 0), matrix(rows, 0));
#pragma unroll
    for (int c = 1; c < Shape::kColumns / 16; ++c) {
      wgmma_shared<kBfloat16>(to, matrix(keys + key_rows + along(c, Shape::kKeyPanel), 0),
                              matrix(rows + along(c, Shape::kRowPanel), 0), 1);
    }
  };

  int head = work.kv_head * p.group;
  int tile = work.first_tile;
  barrier_wait(shared + Shape::kKeysReady, 0);
  float scores[kRows / 2];
  if (work.tiles > 0) {
    barrier_wait(shared + Shape::kQReady, 0);
    wgmma_fence();
    multiply_rows(scores, 0, Shape::kQ);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(scores);
  }
  for (int step = 0; step < work.tiles; ++step) {
    const int stage = step & 1;
    const std::uint32_t parity = static_cast<std::uint32_t>(step / 2 & 1);
    const int row0 = tile * kRows;
    const std::uint32_t at_stage = static_cast<std::uint32_t>(stage * Shape::kRowBytes);

    float grads[kRows / 2];
    barrier_wait(shared + Shape::kGradOutReady + 8 * stage, parity);
    wgmma_fence();
    multiply_rows(grads, Shape::kV, Shape::kGradOut + at_stage);
    wgmma_commit();

    const std::uint32_t lse_at =
        shared + Shape::kLse + static_cast<std::uint32_t>((stage * kRows + pair) * 4);
    std::uint32_t probabilities[kRows / 16][4];
    const bool edge = work.key0 + Shape::kKeys > p.kv_length ||
                      (p.args.causal && work.key0 + Shape::kKeys - 1 > row0 + p.shift);
#pragma unroll
    for (int t = 0; t < kRows / 8; ++t) {
      const float2 lse = load_shared_pair(lse_at + t * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[4 * t + i] =
            exp2_fast(fmaf(scores[4 * t + i], p.scale_log2, (i & 1) ? -lse.y : -lse.x));
      }
    }
    if (edge) {
      const int limit = p.args.causal ? row0 + pair + p.shift : p.kv_length;
#pragma unroll
      for (int t = 0; t < kRows / 8; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + 8 * (i >> 1);
          if (at >= p.kv_length || at > limit + 8 * t + (i & 1)) scores[4 * t + i] = 0.0F;
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kRows / 8; ++t) {
      probabilities[t / 2][t % 2 * 2] = pack<kBfloat16>(scores[4 * t], scores[4 * t + 1]);
      probabilities[t / 2][t % 2 * 2 + 1] = pack<kBfloat16>(scores[4 * t + 2], scores[4 * t + 3]);
    }
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < kRows / 16; ++r) {
      wgmma_transposed<kBfloat16>(grad_v, probabilities[r],
                                  matrix(Shape::kGradOut + at_stage + r * 2048, Shape::kRowPanel));
    }
    wgmma_commit();
    wgmma_wait<1>();
    fence_registers(grads);

    std::uint32_t score_grads[kRows / 16][4];
#pragma unroll
    for (int t = 0; t < kRows / 8; ++t) {
      const float2 delta = load_shared_pair(lse_at + Shape::kDelta - Shape::kLse + t * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        grads[4 * t + i] = scores[4 * t + i] * (grads[4 * t + i] - ((i & 1) ? delta.y : delta.x));
      }
      score_grads[t / 2][t % 2 * 2] = pack<kBfloat16>(grads[4 * t], grads[4 * t + 1]);
      score_grads[t / 2][t % 2 * 2 + 1] = pack<kBfloat16>(grads[4 * t + 2], grads[4 * t + 3]);
      if (t % 2 == 1) {
        const int r = t / 2;
        store_matrices((score_store ^ static_cast<std::uint32_t>((2 * r & 7) << 4)) +
                           stage * Shape::kScoreBytes + r / 4 * Shape::kKeyPanel,
                       score_grads[r][0], score_grads[r][1], score_grads[r][2], score_grads[r][3]);
      }
    }
    bulk_fence();
    wgmma_wait<0>();
    fence_registers(grad_v);
    if (step + 1 < work.tiles) {
      barrier_wait(shared + Shape::kQReady + 8 * (stage ^ 1),
                   static_cast<std::uint32_t>((step + 1) / 2 & 1));
    }
    // Whoever writes this half of dS again has passed the barrier of the next step, which a warp
    // reaches only when its grad_q of this step is done.
    group_sync(1, 256);

    float grad_q[32];
    const std::uint32_t score_grad_columns =
        Shape::kScoreGrad + static_cast<std::uint32_t>(stage * Shape::kScoreBytes) +
        (Shape::kColumns == 128 ? 0 : half);
    const std::uint32_t k_columns = Shape::kColumns == 128 ? half : 0;
    wgmma_fence();
    wgmma_both_transposed<kBfloat16, false>(grad_q, matrix(score_grad_columns, 0),
                                            matrix(k_columns, 0));
#pragma unroll
    for (int r = 1; r < Shape::kKeys / 16; ++r) {
      wgmma_both_transposed<kBfloat16, true>(grad_q, matrix(score_grad_columns + r * 2048, 0),
                                             matrix(k_columns + r * 2048, 0));
    }
    wgmma_commit();
#pragma unroll
    for (int r = 0; r < kRows / 16; ++r) {
      wgmma_transposed<kBfloat16>(grad_k, score_grads[r],
                                  matrix(Shape::kQ + at_stage + r * 2048, Shape::kRowPanel));
    }
    wgmma_commit();
    // The scores of the next step. After the last one the product, of what the stage held before,
    // goes unused.
    multiply_rows(scores, 0, Shape::kQ + Shape::kRowBytes - at_stage);
    wgmma_commit();
    wgmma_wait<2>();
    fence_registers(grad_q);

    const int row_piece = row0 / 16 + warp + (Shape::kColumns == 128 ? 0 : 4 * group);
    float* sums =
        p.sums +
        ((static_cast<std::int64_t>(work.batch) * p.heads + head) * (p.rows / 16) + row_piece) *
            16 * p.columns +
        (Shape::kColumns == 128 ? group * 1024 : 0) + lane * 4;
    if (p.args.deterministic) {
      if (thread % 128 == 0) {
        const FlashBackwardTurn turn(p, work.batch, head, row0, kRows, Shape::kKeys, work.kv_block,
                                     group);
        turn.wait();
      }
      group_sync(2 + group, 128);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      add_global(sums + c * 128, grad_q[4 * c], grad_q[4 * c + 1], grad_q[4 * c + 2],
                 grad_q[4 * c + 3]);
    }
    if (p.args.deterministic) {
      __threadfence();
      group_sync(2 + group, 128);
      if (thread % 128 == 0) {
        const FlashBackwardTurn turn(p, work.batch, head, row0, kRows, Shape::kKeys, work.kv_block,
                                     group);
        turn.pass();
      }
    }
    if (++tile == work.row_tiles) {
      tile = work.first_tile;
      ++head;
    }
    wgmma_wait<0>();
    fence_registers(grad_k);
    fence_registers(scores);
    barrier_arrive(shared + Shape::kStageFree + 8 * stage);
  }

  store_keys_sm90<kBfloat16>(
      static_cast<std::uint16_t*>(p.args.grad_k) + work.batch * p.args.grad_k_strides[0] +
          work.kv_head * p.args.grad_k_strides[1],
      p.args.grad_k_strides[2], grad_k, p.args.scale, pair, key, p.kv_length, p.args.head_dim);
  store_keys_sm90<kBfloat16>(
      static_cast<std::uint16_t*>(p.args.grad_v) + work.batch * p.args.grad_v_strides[0] +
          work.kv_head * p.args.grad_v_strides[1],
      p.args.grad_v_strides[2], grad_v, 1.0F, pair, key, p.kv_length, p.args.head_dim);
}

template <bool kBfloat16, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    flash_backward_sm90_kernel(const __grid_constant__ FlashBackwardParams p,
                               const __grid_constant__ FlashBackwardMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    barrier_init(shared + Shape::kKeysReady, 1);
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(shared + Shape::kQReady + 8 * stage, 1);
      barrier_init(shared + Shape::kGradOutReady + 8 * stage, 1);
      barrier_init(shared + Shape::kStageFree + 8 * stage, 256);
    }
    barrier_init_fence();
  }
  const int number = flash_backward_number(p, shared + Shape::kTicket);
  __syncthreads();
  const FlashBackwardWork work(p, number, Shape::kKeys, Shape::kRows);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == 0) flash_backward_fetch<Shape>(p, maps, work, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
    flash_backward_compute<kBfloat16, Shape>(p, work, shared);
  }
}

}  // namespace xpuruntime::cuda_raw

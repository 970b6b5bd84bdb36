// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda_raw/attention/flash_backward_params.cuh"
#include "cuda_raw/attention/flash_backward_scores.cuh"
#include "cuda_raw/attention/flash_backward_work.cuh"
#include "cuda_raw/mma.cuh"

namespace xpuruntime::cuda_raw {

/// Sizes of one variant. A block of eight warps owns kKeys keys and walks over the query rows,
/// kRows at a time. Up to 128 columns a warp owns 16 keys and keeps P and dS of them in registers
/// for grad_v and grad_k; beyond, two warps share 16 keys, each with half of the rows of P and dS
/// and half of the columns of grad_k and grad_v, and P too goes through shared memory.
template <int kColumnsOf, int kRowsOf, int kStagesOf>
struct FlashBackwardMmaShape {
  static constexpr int kColumns = kColumnsOf;
  static constexpr int kRows = kRowsOf;
  static constexpr int kStages = kStagesOf;
  static constexpr int kThreads = 256;
  static constexpr int kSplit = kColumns > 128 ? 2 : 1;
  static constexpr int kKeys = 128 / kSplit;
  static constexpr int kPitch =
      (kColumns + 63) / 64 * 128;  ///< bytes of a row of q, k, v, grad_out
  static constexpr int kPairs = kColumns / 16;
  static constexpr int kScorePitch = kRows * 2;
  static constexpr int kKeyBytes = kKeys * kPitch;
  static constexpr int kRowBytes = kRows * kPitch;
  static constexpr int kScoreBytes = kKeys * kScorePitch;
  static constexpr int kV = kKeyBytes;
  static constexpr int kQ = 2 * kKeyBytes;
  static constexpr int kGradOut = kQ + kStages * kRowBytes;
  static constexpr int kScoreGrad = kGradOut + kStages * kRowBytes;
  static constexpr int kScore = kScoreGrad + (kSplit > 1 ? kScoreBytes : 0);
  static constexpr int kLse = kScore + kScoreBytes;
  static constexpr int kDelta = kLse + kStages * kRows * 4;
  static constexpr int kBytes = kDelta + kStages * kRows * 4;
};

// Shared memory holds rows of 16-byte pieces; piece c of row r lies at c ^ (r % 8) within each 128
// bytes, so that eight rows of one piece are in different banks. Addresses of a lane are computed
// once for piece 0 and moved to an even piece by an exclusive or.
__device__ inline std::uint32_t piece(std::uint32_t lane_address, int number) {
  return (lane_address ^ static_cast<std::uint32_t>((number & 7) << 4)) +
         static_cast<std::uint32_t>((number >> 3) * 128);
}

template <int kPitch, int kColumns, int kThreads>
__device__ inline void load_rows(std::uint32_t target, const char* source, std::int64_t row_bytes,
                                 int rows, int valid_rows, int valid_pieces) {
  constexpr int kPieces = kColumns / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kPieces; i += kThreads) {
    const int row = i / kPieces;
    const int number = i % kPieces;
    const bool filled = row < valid_rows && number < valid_pieces;
    const char* from = filled ? source + row * row_bytes + number * 16 : source;
    copy_async(target + static_cast<std::uint32_t>(row * kPitch + (number >> 3) * 128 +
                                                   (((number ^ row) & 7) << 4)),
               from, filled);
  }
}

template <bool kBfloat16, int kTiles>
__device__ inline void store_keys(std::uint16_t* target, std::int64_t row_stride,
                                  const float (&sums)[kTiles][4], int first_column, int pair_step,
                                  float factor, int key, int keys, int head_dim) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = first_column + (tile / 2) * pair_step + (tile % 2) * 8;
    if (column >= head_dim) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key + 8 * half >= keys) continue;
      *reinterpret_cast<std::uint32_t*>(target + (key + 8 * half) * row_stride + column) =
          pack<kBfloat16>(sums[tile][2 * half] * factor, sums[tile][2 * half + 1] * factor);
    }
  }
}

template <bool kBfloat16, typename Shape, bool kGeneral>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    flash_backward_mma_kernel(const __grid_constant__ FlashBackwardParams p) {
  constexpr int kSplit = Shape::kSplit;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kRows = Shape::kRows;
  constexpr int kPitch = Shape::kPitch;
  constexpr int kScorePitch = Shape::kScorePitch;
  constexpr int kTiles = kRows / kSplit / 8;             // 16 x 8 tiles of scores a warp
  constexpr int kKeyTiles = 2 * Shape::kPairs / kSplit;  // and of grad_k and grad_v
  constexpr int kParts = 8 / (kRows / 16);               // warps that share 16 rows of grad_q
  constexpr int kPartPairs = (Shape::kPairs + kParts - 1) / kParts;

  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  const int group = warp / kSplit;
  const int part = warp % kSplit;

  const FlashBackwardWork work(p, flash_backward_number(p, shared), kKeys, kRows);
  const int batch = work.batch;
  const int key0 = work.key0;
  const int head_dim = p.args.head_dim;
  const int pieces = head_dim / 8;

  auto load_tile = [&](int stage, int head, int tile) {
    const int row0 = tile * kRows;
    const char* q =
        static_cast<const char*>(p.args.q) +
        2 * (batch * p.args.q_strides[0] + head * p.args.q_strides[1] + row0 * p.args.q_strides[2]);
    const char* grad_out =
        static_cast<const char*>(p.args.grad_out) +
        2 * (batch * p.args.grad_out_strides[0] + head * p.args.grad_out_strides[1] +
             row0 * p.args.grad_out_strides[2]);
    load_rows<kPitch, Shape::kColumns, Shape::kThreads>(
        shared + Shape::kQ + stage * Shape::kRowBytes, q, 2 * p.args.q_strides[2], kRows,
        p.q_length - row0, pieces);
    load_rows<kPitch, Shape::kColumns, Shape::kThreads>(
        shared + Shape::kGradOut + stage * Shape::kRowBytes, grad_out,
        2 * p.args.grad_out_strides[2], kRows, p.q_length - row0, pieces);
    constexpr int kQuads = kRows / 4;
    if (thread < 2 * kQuads) {
      const int first = thread % kQuads * 4;
      const bool lse = thread < kQuads;
      const std::int64_t at =
          (static_cast<std::int64_t>(batch) * p.heads + head) * p.rows + row0 + first;
      copy_async(shared + (lse ? Shape::kLse : Shape::kDelta) + (stage * kRows + first) * 4,
                 (lse ? p.lse : p.delta) + at, true);
    }
  };

  float grad_k[kKeyTiles][4] = {};
  float grad_v[kKeyTiles][4] = {};

  int head = work.kv_head * p.group;
  int tile = work.first_tile;
  if (work.tiles > 0) {
    const char* k = static_cast<const char*>(p.args.k) +
                    2 * (batch * p.args.k_strides[0] + work.kv_head * p.args.k_strides[1] +
                         key0 * p.args.k_strides[2]);
    const char* v = static_cast<const char*>(p.args.v) +
                    2 * (batch * p.args.v_strides[0] + work.kv_head * p.args.v_strides[1] +
                         key0 * p.args.v_strides[2]);
    load_rows<kPitch, Shape::kColumns, Shape::kThreads>(shared, k, 2 * p.args.k_strides[2], kKeys,
                                                        p.kv_length - key0, pieces);
    load_rows<kPitch, Shape::kColumns, Shape::kThreads>(
        shared + Shape::kV, v, 2 * p.args.v_strides[2], kKeys, p.kv_length - key0, pieces);
    load_tile(0, head, tile);
    copy_async_commit();
  }

  // Addresses of this lane. Rows are 0 modulo 8 apart, so that row % 8 is lane % 8 throughout.
  const int low = lane & 7;
  const int high = lane >> 4;
  const int odd = (lane >> 3) & 1;
  const std::uint32_t key_lane =
      shared +
      static_cast<std::uint32_t>((16 * group + (lane & 15)) * kPitch + ((high ^ low) << 4));
  const std::uint32_t row_lane =
      shared + static_cast<std::uint32_t>((part * (kRows / kSplit) + low + 8 * high) * kPitch +
                                          ((odd ^ low) << 4));
  const std::uint32_t column_lane =
      shared + static_cast<std::uint32_t>((lane & 15) * kPitch + (((2 * part + high) ^ low) << 4));
  const int score_key = kRows == 64 ? low : (low >> 1) & 3;
  const int quad = lane >> 2;
  const int quad_key = kRows == 64 ? quad : (quad >> 1) & 3;
  const std::uint32_t score_store =
      shared + Shape::kScoreGrad +
      static_cast<std::uint32_t>((16 * group + quad) * kScorePitch +
                                 (((part * kTiles) ^ quad_key) << 4) + 4 * (lane & 3));
  const std::uint32_t score_lane =
      shared + Shape::kScoreGrad +
      static_cast<std::uint32_t>((16 * group + (lane & 15)) * kScorePitch +
                                 ((high ^ score_key) << 4));
  const int row_group = warp / kParts;
  const int column_part = warp % kParts;
  const std::uint32_t score_grad_lane =
      shared + Shape::kScoreGrad +
      static_cast<std::uint32_t>((low + 8 * high) * kScorePitch +
                                 (((2 * row_group + odd) ^ score_key) << 4));
  const std::uint32_t k_lane =
      shared +
      static_cast<std::uint32_t>((lane & 15) * kPitch + (((2 * column_part + high) ^ low) << 4));

  int stage = 0;
  for (int step = 0; step < work.tiles; ++step) {
    copy_async_wait<0>();
    __syncthreads();
    const int row0 = tile * kRows;
    const int this_head = head;
    const bool last_of_head = ++tile == work.row_tiles;
    if (last_of_head) {
      tile = work.first_tile;
      ++head;
    }
    if (Shape::kStages == 2 && step + 1 < work.tiles) {
      load_tile(stage ^ 1, head, tile);
      copy_async_commit();
    }
    const std::uint32_t q_stage = Shape::kQ + stage * Shape::kRowBytes;
    const std::uint32_t grad_out_stage = Shape::kGradOut + stage * Shape::kRowBytes;

    // Scores, keys along the rows of the fragments and query rows along their columns.
    float scores[kTiles][4] = {};
#pragma unroll
    for (int c = 0; c < Shape::kPairs; ++c) {
      std::uint32_t a[4];
      load_matrices(a, piece(key_lane, 2 * c));
#pragma unroll
      for (int t = 0; t < kTiles / 2; ++t) {
        std::uint32_t b[4];
        load_matrices(b, piece(row_lane, 2 * c) + q_stage + t * 16 * kPitch);
        multiply_add<kBfloat16>(scores[2 * t], a, b[0], b[1]);
        multiply_add<kBfloat16>(scores[2 * t + 1], a, b[2], b[3]);
      }
    }

    const int key = key0 + 16 * group + quad;
    const int row = row0 + part * (kRows / kSplit) + 2 * (lane & 3);
    const std::uint32_t row_values =
        shared + Shape::kLse +
        static_cast<std::uint32_t>((stage * kRows + part * (kRows / kSplit) + 2 * (lane & 3)) * 4);
    const FlashBackwardScores<kGeneral> rule(p, batch, this_head);
    [[maybe_unused]] float kept[2][4];
    rule.probabilities(scores, row_values, row, key);
    const bool edge =
        key0 + kKeys > p.kv_length || (p.args.causal && key0 + kKeys - 1 > row0 + p.shift);
    if (edge) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + 8 * (i >> 1);
          const int limit = p.args.causal ? row + 8 * t + (i & 1) + p.shift : p.kv_length;
          if (at >= p.kv_length || at > limit) scores[t][i] = 0.0F;
        }
      }
    }

    float grads[kTiles][4] = {};
#pragma unroll
    for (int c = 0; c < Shape::kPairs; ++c) {
      std::uint32_t a[4];
      load_matrices(a, piece(key_lane, 2 * c) + Shape::kV);
#pragma unroll
      for (int t = 0; t < kTiles / 2; ++t) {
        std::uint32_t b[4];
        load_matrices(b, piece(row_lane, 2 * c) + grad_out_stage + t * 16 * kPitch);
        multiply_add<kBfloat16>(grads[2 * t], a, b[0], b[1]);
        multiply_add<kBfloat16>(grads[2 * t + 1], a, b[2], b[3]);
      }
    }

    // P goes on to grad_v as dropout leaves it; dS = P * (dP - delta).
    std::uint32_t probabilities[kTiles][2];
    std::uint32_t score_grads[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 delta = load_shared_pair(row_values + Shape::kDelta - Shape::kLse + t * 32);
      if (kGeneral && t % 2 == 0) rule.keep(kept, row + 8 * t, key);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float probability = scores[t][i];
        if constexpr (kGeneral) {
          scores[t][i] *= kept[t % 2][i];
          grads[t][i] *= kept[t % 2][i];
        }
        grads[t][i] = probability * (grads[t][i] - ((i & 1) ? delta.y : delta.x));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        probabilities[t][h] = pack<kBfloat16>(scores[t][2 * h], scores[t][2 * h + 1]);
        score_grads[t][h] = pack<kBfloat16>(grads[t][2 * h], grads[t][2 * h + 1]);
        const std::uint32_t to =
            (score_store ^ static_cast<std::uint32_t>(t << 4)) + h * 8 * kScorePitch;
        store_shared(to, score_grads[t][h]);
        if constexpr (kSplit > 1) {
          store_shared(to + Shape::kScore - Shape::kScoreGrad, probabilities[t][h]);
        }
      }
    }
    if constexpr (kSplit > 1) __syncthreads();

    auto add_keys = [&](float (&sums)[kKeyTiles][4], const std::uint32_t (&own)[kTiles][2],
                        std::uint32_t scores_at, std::uint32_t rows_at) {
#pragma unroll
      for (int r = 0; r < kRows / 16; ++r) {
        std::uint32_t a[4];
        if constexpr (kSplit > 1) {
          load_matrices(a, piece(score_lane, 2 * r) + scores_at);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = own[2 * r + i / 2][i % 2];
        }
#pragma unroll
        for (int c = 0; c < kKeyTiles / 2; ++c) {
          std::uint32_t b[4];
          load_matrices_transposed(b,
                                   piece(column_lane, 2 * kSplit * c) + rows_at + r * 16 * kPitch);
          multiply_add<kBfloat16>(sums[2 * c], a, b[0], b[1]);
          multiply_add<kBfloat16>(sums[2 * c + 1], a, b[2], b[3]);
        }
      }
    };
    add_keys(grad_v, probabilities, Shape::kScore - Shape::kScoreGrad, grad_out_stage);
    if constexpr (kSplit == 1) __syncthreads();
    add_keys(grad_k, score_grads, 0, q_stage);

    if (Shape::kStages == 1 && step + 1 < work.tiles) {
      __syncthreads();
      load_tile(0, head, tile);
      copy_async_commit();
    }

    float grad_q[2 * kPartPairs][4] = {};
#pragma unroll
    for (int r = 0; r < kKeys / 16; ++r) {
      std::uint32_t a[4];
      load_matrices_transposed(a, score_grad_lane + r * 16 * kScorePitch);
#pragma unroll
      for (int c = 0; c < kPartPairs; ++c) {
        if (Shape::kPairs % kParts != 0 && kParts * c + column_part >= Shape::kPairs) continue;
        std::uint32_t b[4];
        load_matrices_transposed(b, piece(k_lane, 2 * kParts * c) + r * 16 * kPitch);
        multiply_add<kBfloat16>(grad_q[2 * c], a, b[0], b[1]);
        multiply_add<kBfloat16>(grad_q[2 * c + 1], a, b[2], b[3]);
      }
    }
    const std::int64_t row_piece =
        (static_cast<std::int64_t>(batch) * p.heads + this_head) * (p.rows / 16) + row0 / 16 +
        row_group;
    float* sums = p.sums + row_piece * 16 * p.columns + lane * 4;
    const FlashBackwardTurn turn(p, batch, this_head, row0, kRows, kKeys, work.kv_block, 0);
    if (p.args.deterministic) {
      if (thread == 0) turn.wait();
      __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < kPartPairs; ++c) {
      const int pair = kParts * c + column_part;
      if (Shape::kPairs % kParts != 0 && pair >= Shape::kPairs) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float (&f)[4] = grad_q[2 * c + h];
        add_global(sums + (2 * pair + h) * 128, f[0], f[1], f[2], f[3]);
      }
    }
    if (p.args.deterministic) {
      __threadfence();
      __syncthreads();
      if (thread == 0) turn.pass();
    }
    if (Shape::kStages == 2) stage ^= 1;
  }

  const int key = key0 + 16 * group + quad;
  const int column = 16 * part + 2 * (lane & 3);
  store_keys<kBfloat16>(static_cast<std::uint16_t*>(p.args.grad_k) +
                            batch * p.args.grad_k_strides[0] +
                            work.kv_head * p.args.grad_k_strides[1],
                        p.args.grad_k_strides[2], grad_k, column, 16 * kSplit, p.args.scale, key,
                        p.kv_length, head_dim);
  store_keys<kBfloat16>(
      static_cast<std::uint16_t*>(p.args.grad_v) + batch * p.args.grad_v_strides[0] +
          work.kv_head * p.args.grad_v_strides[1],
      p.args.grad_v_strides[2], grad_v, column, 16 * kSplit, 1.0F, key, p.kv_length, head_dim);
}

}  // namespace xpuruntime::cuda_raw

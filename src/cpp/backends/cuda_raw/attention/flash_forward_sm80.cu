// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cuda_runtime.h>

#include <cmath>

#include "cuda/check.h"
#include "cuda_raw/attention/flash_forward.h"
#include "cuda_raw/attention/flash_forward_mask.cuh"
#include "cuda_raw/mma.cuh"

// One block of four warps computes kRows query rows of one head; each warp owns kRows / 4 of them.
// Keys and values pass through shared memory kColumns rows at a time, last tile first: while one of
// the two is multiplied, the other one arrives. Tiles lie in shared memory as panels of 64 columns,
// a row 128 bytes, whose 16-byte chunks are permuted by row so that ldmatrix meets no bank twice.
namespace xpuruntime::cuda_raw {
namespace {

constexpr int kThreads = 128;

template <int kHeadDim>
struct Tile {
  static constexpr int kRowTiles = kHeadDim <= 128 ? 2 : 1;  // of 16 rows a warp
  static constexpr int kRows = 64 * kRowTiles;
  static constexpr int kColumns = 64;
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr int kSharedBytes = kPanels * 128 * (kRows + 2 * kColumns);
};

// Copies rows [first, first + kRows) of one head into a tile; zeros where there is nothing. A
// thread has one 16-byte chunk of every panel in every sixteenth row.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void load_tile(std::uint32_t tile, const std::uint16_t* head,
                                          std::int64_t stride, int first, int length,
                                          int head_dim) {
  const int row = static_cast<int>(threadIdx.x) / 8;
  const int chunk = static_cast<int>(threadIdx.x) % 8;
  const std::uint16_t* const from = head + (first + row) * stride + chunk * 8;
  const std::uint32_t to = tile + static_cast<std::uint32_t>(row * 128 + ((chunk ^ row) & 7) * 16);
#pragma unroll
  for (int panel = 0; panel < (kHeadDim + 63) / 64; ++panel) {
    if (kHeadDim - panel * 64 < 64 && chunk * 8 >= kHeadDim - panel * 64) continue;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const bool valid = first + row + i * 16 < length && panel * 64 + chunk * 8 < head_dim;
      copy_async(to + static_cast<std::uint32_t>((panel * kRows + i * 16) * 128),
                 valid ? from + i * 16 * stride + panel * 64 : head, valid);
    }
  }
}

// kGeneral: with a mask, dropout or a scale that is not positive.
template <int kHeadDim, bool kBfloat16, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2)
    forward(const __grid_constant__ FlashForwardArgs args,
            const __grid_constant__ FlashExtras extras, int row_blocks) {
  using T = Tile<kHeadDim>;
  constexpr int kRows = T::kRows;
  constexpr int kColumns = T::kColumns;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t q_tile = shared_address(shared);
  const std::uint32_t k_tile = q_tile + T::kPanels * kRows * 128;
  const std::uint32_t v_tile = k_tile + T::kPanels * kColumns * 128;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // The longest blocks of a causal head start first.
  const int bh = static_cast<int>(blockIdx.x) / row_blocks;
  const int row_block = row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks;
  const int batch = bh / static_cast<int>(args.heads);
  const int head = bh - batch * static_cast<int>(args.heads);
  const int kv_head = head / static_cast<int>(args.heads / args.kv_heads);
  const int q_length = static_cast<int>(args.q_length);
  const int kv_length = static_cast<int>(args.kv_length);
  const int first_row = row_block * kRows;
  const int warp_row = first_row + warp * 16 * T::kRowTiles;

  const auto start = [&](const void* base, const std::int64_t* strides, int h) {
    return static_cast<const std::uint16_t*>(base) + batch * strides[0] + h * strides[1];
  };
  const std::uint16_t* const q = start(args.q, args.q_strides, head);
  const std::uint16_t* const k = start(args.k, args.k_strides, kv_head);
  const std::uint16_t* const v = start(args.v, args.v_strides, kv_head);
  const std::int64_t mask_head = batch * extras.mask_strides[0] + head * extras.mask_strides[1];

  // Row r attends to columns below r + diagonal.
  const int diagonal = 1 + (args.causal_bottom_right ? kv_length - q_length : 0);
  int limit = kv_length;
  if (args.causal) {
    limit = min(limit, min(first_row + kRows, q_length) - 1 + diagonal);
  }
  const int tiles = limit <= 0 ? 0 : (limit + kColumns - 1) / kColumns;

  float out[T::kRowTiles][kHeadDim / 8][4] = {};
  float row_max[T::kRowTiles][2];
  float row_sum[T::kRowTiles][2] = {};
#pragma unroll
  for (int t = 0; t < T::kRowTiles; ++t) row_max[t][0] = row_max[t][1] = -INFINITY;

  const float to_log2 = args.scale * kLog2E;
  const float factor = kGeneral ? 1.0f : to_log2;
  const Dropout dropout = kGeneral ? Dropout(extras) : Dropout();

  const int seven = lane & 7;
  const std::uint32_t q_row =
      q_tile + static_cast<std::uint32_t>((warp * 16 * T::kRowTiles + (lane & 15)) * 128);
  const std::uint32_t q_chunk = static_cast<std::uint32_t>(((lane >> 4) ^ seven) * 16);
  const std::uint32_t k_row = k_tile + static_cast<std::uint32_t>((seven + (lane >> 4) * 8) * 128);
  const std::uint32_t k_chunk = static_cast<std::uint32_t>((((lane >> 3) & 1) ^ seven) * 16);
  const std::uint32_t v_row = v_tile + static_cast<std::uint32_t>((lane & 15) * 128);

  if (tiles > 0) {
    load_tile<kHeadDim, kRows>(q_tile, q, args.q_strides[2], first_row, q_length, args.head_dim);
    load_tile<kHeadDim, kColumns>(k_tile, k, args.k_strides[2], (tiles - 1) * kColumns, kv_length,
                                  args.head_dim);
    copy_async_commit();
  }

  for (int tile = tiles - 1; tile >= 0; --tile) {
    const int first_column = tile * kColumns;
    copy_async_wait<0>();
    __syncthreads();  // k is here, and no warp reads the last v any more
    load_tile<kHeadDim, kColumns>(v_tile, v, args.v_strides[2], first_column, kv_length,
                                  args.head_dim);
    copy_async_commit();

    float score[T::kRowTiles][kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const std::uint32_t in_panel = static_cast<std::uint32_t>(step % 4 * 32);
      std::uint32_t a[T::kRowTiles][4];
#pragma unroll
      for (int t = 0; t < T::kRowTiles; ++t) {
        load_matrices(a[t], q_row + (step / 4 * kRows + t * 16) * 128 + (q_chunk ^ in_panel));
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        std::uint32_t b[4];
        load_matrices(b, k_row + (step / 4 * kColumns + n * 16) * 128 + (k_chunk ^ in_panel));
#pragma unroll
        for (int t = 0; t < T::kRowTiles; ++t) {
          multiply_add<kBfloat16>(score[t][2 * n], a[t], b[0], b[1]);
          multiply_add<kBfloat16>(score[t][2 * n + 1], a[t], b[2], b[3]);
        }
      }
    }

    copy_async_wait<0>();
    __syncthreads();  // v is here, and no warp reads this k any more
    if (tile > 0) {
      load_tile<kHeadDim, kColumns>(k_tile, k, args.k_strides[2], first_column - kColumns,
                                    kv_length, args.head_dim);
      copy_async_commit();
    }

    const bool cut = first_column + kColumns > kv_length ||
                     (args.causal && first_column + kColumns > warp_row + diagonal);
#pragma unroll
    for (int t = 0; t < T::kRowTiles; ++t) {
      const int row = warp_row + t * 16 + lane / 4;
      if constexpr (kGeneral) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) score[t][n][e] *= to_log2;
        }
        if (extras.mask_kind != kMaskNone) {
          mask_scores<kColumns / 2, kBfloat16>(score[t][0], extras, mask_head, row,
                                               first_column + lane % 4 * 2, q_length, kv_length);
        }
      }
      if (cut) {
        // Columns from `end` on, counted from this thread's first one, are out.
        int end[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int last = kv_length;
          if (args.causal) last = min(last, row + half * 8 + diagonal);
          end[half] = last - first_column - lane % 4 * 2;
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (n * 8 + e % 2 >= end[e / 2]) score[t][n][e] = -INFINITY;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = row_max[t][half];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          top = fmaxf(top, fmaxf(score[t][n][2 * half], score[t][n][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float base = top == -INFINITY ? 0.0f : top * factor;
        const float rescale = exp2_fast(row_max[t][half] * factor - base);
        row_max[t][half] = top;
        float sum = row_sum[t][half] * rescale;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            score[t][n][e] = exp2_fast(fmaf(score[t][n][e], factor, -base));
            sum += score[t][n][e];
          }
        }
        row_sum[t][half] = sum;
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d) {
          out[t][d][2 * half] *= rescale;
          out[t][d][2 * half + 1] *= rescale;
        }
      }
      if constexpr (kGeneral) {
        if (dropout.threshold != 0) {
          drop_weights<kColumns / 2>(score[t][0], dropout, bh, row, first_column + lane % 4 * 2);
        }
      }
    }

#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      std::uint32_t a[T::kRowTiles][4];
#pragma unroll
      for (int t = 0; t < T::kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = score[t][2 * step + i / 2];
          a[t][i] = pack<kBfloat16>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        const std::uint32_t chunk =
            static_cast<std::uint32_t>(((d % 4 * 2 + (lane >> 4)) ^ seven) * 16);
        std::uint32_t b[4];
        load_matrices_transposed(b, v_row + (d / 4 * kColumns + step * 16) * 128 + chunk);
#pragma unroll
        for (int t = 0; t < T::kRowTiles; ++t) {
          multiply_add<kBfloat16>(out[t][2 * d], a[t], b[0], b[1]);
          multiply_add<kBfloat16>(out[t][2 * d + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // The result passes through the part of the query's tile that this warp alone has read.
#pragma unroll
  for (int t = 0; t < T::kRowTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[t][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float weight = sum == 0.0f ? 0.0f : dropout.keep_scale / sum;
      const int row = warp_row + t * 16 + half * 8 + lane / 4;
      if (args.lse != nullptr && lane % 4 == 0 && row < q_length) {
        args.lse[static_cast<std::int64_t>(bh) * q_length + row] =
            sum == 0.0f ? -INFINITY : (row_max[t][half] * factor * kLn2 + logf(sum));
      }
      const int in_tile = row - first_row;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
        const int at = (d / 8 * kRows + in_tile) * 128 + ((d ^ in_tile) & 7) * 16 + lane % 4 * 4;
        *reinterpret_cast<std::uint32_t*>(shared + at) =
            pack<kBfloat16>(out[t][d][2 * half] * weight, out[t][d][2 * half + 1] * weight);
      }
    }
  }
  __syncwarp();
  std::uint16_t* const result = static_cast<std::uint16_t*>(args.out) +
                                batch * args.out_strides[0] + head * args.out_strides[1];
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll
  for (int i = 0; i < T::kRowTiles * 16 * kChunks / 32; ++i) {
    const int item = i * 32 + lane;
    const int chunk = item % kChunks;
    const int in_tile = warp * 16 * T::kRowTiles + item / kChunks;
    const int row = first_row + in_tile;
    if (row < q_length && chunk * 8 < args.head_dim) {
      const int at = (chunk / 8 * kRows + in_tile) * 128 + ((chunk ^ in_tile) & 7) * 16;
      *reinterpret_cast<uint4*>(result + row * args.out_strides[2] + chunk * 8) =
          *reinterpret_cast<const uint4*>(shared + at);
    }
  }
}

template <int kHeadDim, bool kBfloat16, bool kGeneral>
void launch(const FlashForwardArgs& args, cudaStream_t stream) {
  using T = Tile<kHeadDim>;
  FlashForwardArgs copy = args;
  int row_blocks = static_cast<int>((args.q_length + T::kRows - 1) / T::kRows);
  FlashExtras extras = flash_extras(args);
  void* parameters[] = {&copy, &extras, &row_blocks};
  const void* kernel = reinterpret_cast<const void*>(&forward<kHeadDim, kBfloat16, kGeneral>);
  cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes),
      "cudaFuncSetAttribute");
  const unsigned int blocks = static_cast<unsigned int>(row_blocks * args.batch * args.heads);
  cuda::check(
      cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), parameters, T::kSharedBytes, stream),
      "cudaLaunchKernel of the attention forward kernel");
}

template <int kHeadDim>
void launch(const FlashForwardArgs& args, cudaStream_t stream) {
  const bool general = args.mask_kind != kMaskNone || args.dropout_p > 0.0f || !(args.scale > 0.0f);
  if (args.bfloat16) {
    general ? launch<kHeadDim, true, true>(args, stream)
            : launch<kHeadDim, true, false>(args, stream);
  } else {
    general ? launch<kHeadDim, false, true>(args, stream)
            : launch<kHeadDim, false, false>(args, stream);
  }
}

}  // namespace

void flash_forward_mma(const FlashForwardArgs& args, cudaStream_t stream) {
  if (args.batch * args.heads * args.q_length == 0) return;
  if (args.head_dim <= 32) return launch<32>(args, stream);
  if (args.head_dim <= 64) return launch<64>(args, stream);
  if (args.head_dim <= 96) return launch<96>(args, stream);
  if (args.head_dim <= 128) return launch<128>(args, stream);
  if (args.head_dim <= 192) return launch<192>(args, stream);
  launch<256>(args, stream);
}

}  // namespace xpuruntime::cuda_raw

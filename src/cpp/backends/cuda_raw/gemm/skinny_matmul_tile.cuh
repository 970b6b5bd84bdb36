// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/gemm/skinny_matmul_ptx.cuh"
#include "cuda_raw/gemm/skinny_matmul_shape.h"

// What both skinny matmul kernels share: how a tile lies in shared memory, how it is multiplied,
// and how partial sums become the output.
//
// The transposed product is computed, out^T[n, m] = b^T[n, k] * a^T[k, m], so that b is the operand
// of which the tensor cores take 16 rows at a time and a the one of which they take 8: a small m
// wastes little.
//
// Both operands lie in shared memory as panels 64 elements (128 bytes) wide, one below the other;
// the eight 16-byte units of line r are exchanged by r % 8, as the copy engine does it, so that
// eight rows read at once come from different banks.
namespace xpuruntime::cuda_raw::skinny {

/// What a kernel is given. Strides are in elements; those of the batch are for one step of it.
struct Problem {
  const void* a;
  const void* b;
  const void* bias;  // n elements, or null
  void* out;
  std::int64_t lda, ldb, ldout;
  std::int64_t a_batch, b_batch, out_batch;
  int m, n, k;
  int activation;
  int stages;
  int split;        // blocks of a cluster that share one tile, each with a part of k
  int ring_offset;  // of the chunks in a block's shared memory
  int prefetch;     // bytes of each row of a transposed b to bring into the L2 cache early
  bool weights_are_constant;
};

/// The address of 16-byte unit `unit` of row `row` in a tile of panels of `rows` rows.
__device__ __forceinline__ std::uint32_t unit_address(std::uint32_t tile, int rows, int row,
                                                      int unit) {
  const int line = unit / 8 * rows + row;
  return tile + 128 * line + 16 * (unit % 8 ^ line % 8);
}

template <typename S>
using Accumulator = float[S::kRowTiles][S::kMTiles][4];

/// Adds the product of one chunk, of which `length` elements of k count: the others are zeros. `m`
/// is the number of rows in the panels of a.
template <typename T, typename S>
__device__ __forceinline__ void multiply_chunk(Accumulator<S>& acc, std::uint32_t b,
                                               std::uint32_t a, int length, int m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_n = warp % S::kWarpsN;
  const int warp_k = warp / S::kWarpsN;
  const int row = lane % 8;
  const int odd = lane / 8 % 2;
  const int upper = lane / 16;
#pragma unroll
  for (int step = 0; step < S::kChunk / 32 / S::kWarpsK; ++step) {
    const int group = step * S::kWarpsK + warp_k;  // 32 elements of k: two instructions
    if (32 * group >= length) break;
    uint4 x[S::kMTiles];
#pragma unroll
    for (int j = 0; j < S::kMTiles; ++j) {
      // Rows that are not there: any other, as their sums are not used.
      x[j] = load_matrices(unit_address(a, m, min(8 * j + row, m - 1), 4 * group + lane / 8));
    }
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
      const int column = 16 * (warp_n * S::kRowTiles + i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 w;
        if constexpr (S::kTransposed) {
          w = load_matrices(
              unit_address(b, S::kRows, column + 8 * odd + row, 4 * group + 2 * half + upper));
        } else {
          w = load_matrices_transposed(unit_address(
              b, S::kRows, 32 * group + 16 * half + 8 * upper + row, column / 8 + odd));
        }
#pragma unroll
        for (int j = 0; j < S::kMTiles; ++j) {
          multiply_add<T>(acc[i][j], w.x, w.y, w.z, w.w, half == 0 ? x[j].x : x[j].z,
                          half == 0 ? x[j].y : x[j].w);
        }
      }
    }
  }
}

// Not inlined: a kernel that runs for microseconds waits for each line of its code once.
inline __device__ __noinline__ float activate_smoothly(float x, int activation) {
  switch (activation) {
    case 2:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case 3:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default:
      return x / (1.0f + expf(-x));
  }
}

__device__ __forceinline__ float activate(float x, int activation) {
  if (activation == 0) return x;
  if (activation == 1) return x < 0.0f ? 0.0f : x;  // keeps NaN
  return activate_smoothly(x, activation);
}

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(x);
}

/// Writes two elements of column `column` of out, in row `row` and the next, those that exist.
template <typename T>
__device__ __forceinline__ void finish(const Problem& p, T* out, int row, int column, float upper,
                                       float lower) {
  if (column >= p.n) return;
  const float bias = p.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(p.bias)[column]);
  T* place = out + row * p.ldout + column;
  if (row < p.m) from_float(activate(upper + bias, p.activation), place[0]);
  if (row + 1 < p.m) from_float(activate(lower + bias, p.activation), place[p.ldout]);
}

/// Adds up the partial sums of the block's warps, then those of the cluster's blocks, always in the
/// same order, and writes the tile. Called by all S::kThreads threads once no chunk is read any
/// more.
///
/// A fragment is what one instruction accumulates, 16 columns of 8 rows, four sums a lane. Of warps
/// side by side over k, each sums up every kWarpsK-th fragment of all of them; of those, each block
/// of the cluster every split-th one. `partial` (partial_bytes()) may lie where chunks lay,
/// `receive` (receive_bytes()) may not. With split > 1 the block has arrived at the cluster's
/// barrier once before.
template <typename T, typename S>
__device__ __forceinline__ void reduce_and_write(const Problem& p, const Accumulator<S>& acc,
                                                 float4* partial, float4* receive, int first_column,
                                                 int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_n = warp % S::kWarpsN;
  const int warp_k = warp / S::kWarpsN;
  const auto sum_up = [&](const float4* from, int count) {
    float4 sum = from[lane];
    for (int i = 1; i < count; ++i) {
      const float4 v = from[32 * i + lane];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    return sum;
  };
  T* out = static_cast<T*>(p.out) + blockIdx.y * p.out_batch;
  const auto write = [&](int fragment, float4 sum) {
    const int row = 8 * (fragment % S::kMTiles) + 2 * (lane % 4);
    const int column =
        first_column + lane / 4 + 16 * (warp_n * S::kRowTiles + fragment / S::kMTiles);
    finish<T>(p, out, row, column, sum.x, sum.y);
    finish<T>(p, out, row, column + 8, sum.z, sum.w);
  };

  float4* own = partial + warp_n * S::kFragments * S::kWarpsK * 32;
#pragma unroll
  for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < S::kMTiles; ++j) {
      if (8 * j < p.m) {
        own[((i * S::kMTiles + j) * S::kWarpsK + warp_k) * 32 + lane] =
            make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
      }
    }
  }
  synchronize_first(S::kThreads);
#if __CUDA_ARCH__ >= 900
  if (p.split > 1) {
    const int share = (S::kFragmentsOfWarp + p.split - 1) / p.split;
    float4* mine = receive + (warp_n * S::kWarpsK + warp_k) * share * p.split * 32;
    cluster_wait();  // every block of the cluster is there to be written to
    int owner = 0;   // of fragment i: i % split
    int base = rank;
#pragma unroll 1
    for (int i = 0; i < S::kFragmentsOfWarp; ++i) {
      const int fragment = i * S::kWarpsK + warp_k;
      if (fragment >= S::kFragments) break;
      const float4 sum = sum_up(own + fragment * S::kWarpsK * 32, S::kWarpsK);
      store_cluster(shared_address(mine + base * 32 + lane), owner, sum);
      if (++owner == p.split) {
        owner = 0;
        base += p.split;
      }
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (int i = rank; i < S::kFragmentsOfWarp; i += p.split) {
      const int fragment = i * S::kWarpsK + warp_k;
      if (fragment >= S::kFragments) break;
      write(fragment, sum_up(mine + (i - rank) * 32, p.split));
    }
    return;
  }
#endif
#pragma unroll 1
  for (int fragment = warp_k; fragment < S::kFragments; fragment += S::kWarpsK) {
    if (8 * (fragment % S::kMTiles) >= p.m) continue;
    write(fragment, sum_up(own + fragment * S::kWarpsK * 32, S::kWarpsK));
  }
}

/// The part of k that block `rank` of the cluster takes: [begin, end), on borders of chunks.
template <typename S>
__device__ __forceinline__ void part_of_k(const Problem& p, int rank, int& begin, int& end) {
  // At most 2^31 / 64 chunks and 8 blocks: 32 bits suffice.
  const unsigned chunks = (static_cast<unsigned>(p.k) + S::kChunk - 1) / S::kChunk;
  const unsigned split = static_cast<unsigned>(p.split);
  const unsigned first = chunks * static_cast<unsigned>(rank) / split;
  const unsigned last = chunks * static_cast<unsigned>(rank + 1) / split;
  begin = static_cast<int>(min(first * S::kChunk, static_cast<unsigned>(p.k)));
  end = static_cast<int>(min(last * S::kChunk, static_cast<unsigned>(p.k)));
}

}  // namespace xpuruntime::cuda_raw::skinny

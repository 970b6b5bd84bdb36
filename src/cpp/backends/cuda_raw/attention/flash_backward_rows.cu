// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cmath>

#include "cuda/check.h"
#include "cuda_raw/attention/flash_backward_params.cuh"
#include "cuda_raw/mma.cuh"

namespace xpuruntime::cuda_raw {
namespace {

constexpr int kThreads = 256;

template <bool kBfloat16>
__device__ float2 unpack(std::uint32_t packed) {
  if constexpr (kBfloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&packed));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

// kLanes lanes a row, 8 columns each: as many as head_dim needs, rounded up to a power of two.
template <bool kBfloat16, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ FlashBackwardParams p, std::int64_t all_rows) {
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int column = static_cast<int>(threadIdx.x % kLanes) * 8;
  const int row = static_cast<int>(index % p.rows);
  const std::int64_t batch_head = index / p.rows;
  const std::int64_t batch = batch_head / p.heads;
  const std::int64_t head = batch_head % p.heads;
  const bool valid = index < all_rows && row < p.q_length;
  float sum = 0.0F;
  if (valid && column < p.args.head_dim) {
    const auto at = [&](const void* base, const std::int64_t (&strides)[3]) {
      return *reinterpret_cast<const uint4*>(
          static_cast<const char*>(base) +
          2 * (batch * strides[0] + head * strides[1] + row * strides[2] + column));
    };
    const uint4 out = at(p.args.out, p.args.out_strides);
    const uint4 grad = at(p.args.grad_out, p.args.grad_out_strides);
    const std::uint32_t a[4] = {out.x, out.y, out.z, out.w};
    const std::uint32_t b[4] = {grad.x, grad.y, grad.z, grad.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<kBfloat16>(a[i]);
      const float2 y = unpack<kBfloat16>(b[i]);
      sum += x.x * y.x + x.y * y.y;
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0U, sum, step);
  if (column != 0 || index >= all_rows) return;
  float lse = INFINITY;
  if (valid) {
    lse = p.args.lse[batch_head * p.q_length + row];
    if (lse == -INFINITY) {
      lse = INFINITY;
    } else if (p.args.mask_kind < 2) {
      lse *= 1.4426950408889634F;
    }
  }
  p.lse[index] = lse;
  p.delta[index] = sum;
}

// A warp takes 16 rows, a lane two of them (8 apart) and every fourth piece of 8 columns.
template <bool kBfloat16>
__global__ void __launch_bounds__(kThreads)
    grad_q_kernel(const __grid_constant__ FlashBackwardParams p, std::int64_t row_pieces) {
  const std::int64_t piece =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (piece >= row_pieces) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t batch_head = piece / (p.rows / 16);
  const int row = static_cast<int>(piece % (p.rows / 16)) * 16 + lane / 4;
  if (row >= p.q_length) return;
  const std::int64_t batch = batch_head / p.heads;
  const std::int64_t head = batch_head % p.heads;
  char* target = static_cast<char*>(p.args.grad_q) +
                 2 * (batch * p.args.grad_q_strides[0] + head * p.args.grad_q_strides[1] +
                      row * p.args.grad_q_strides[2]);
  const float4* sums = reinterpret_cast<const float4*>(p.sums + piece * 16 * p.columns);
  for (int part = lane % 4; part < p.args.head_dim / 8; part += 4) {
    std::uint32_t upper[4];
    std::uint32_t lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 f = sums[part * 32 + lane / 4 * 4 + i];
      upper[i] = pack<kBfloat16>(f.x * p.args.scale, f.y * p.args.scale);
      lower[i] = pack<kBfloat16>(f.z * p.args.scale, f.w * p.args.scale);
    }
    *reinterpret_cast<uint4*>(target + part * 16) =
        make_uint4(upper[0], upper[1], upper[2], upper[3]);
    if (row + 8 < p.q_length) {
      *reinterpret_cast<uint4*>(target + 16 * p.args.grad_q_strides[2] + part * 16) =
          make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
}

template <bool kBfloat16, int kLanes>
void launch_rows(const FlashBackwardParams& params, cudaStream_t stream) {
  const std::int64_t rows = params.args.batch * params.heads * params.rows;
  constexpr int kRowsABlock = kThreads / kLanes;
  rows_kernel<kBfloat16, kLanes>
      <<<static_cast<unsigned int>((rows + kRowsABlock - 1) / kRowsABlock), kThreads, 0, stream>>>(
          params, rows);
  cuda::check(cudaGetLastError(), "flash_backward_rows");
}

}  // namespace

void flash_backward_rows(const FlashBackwardParams& params, cudaStream_t stream) {
  const int columns = params.args.head_dim;
  if (params.args.bfloat16) {
    return columns <= 64    ? launch_rows<true, 8>(params, stream)
           : columns <= 128 ? launch_rows<true, 16>(params, stream)
                            : launch_rows<true, 32>(params, stream);
  }
  return columns <= 64    ? launch_rows<false, 8>(params, stream)
         : columns <= 128 ? launch_rows<false, 16>(params, stream)
                          : launch_rows<false, 32>(params, stream);
}

void flash_backward_grad_q(const FlashBackwardParams& params, cudaStream_t stream) {
  const std::int64_t pieces = params.args.batch * params.heads * (params.rows / 16);
  const auto kernel = params.args.bfloat16 ? grad_q_kernel<true> : grad_q_kernel<false>;
  constexpr int kPiecesABlock = kThreads / 32;
  kernel<<<static_cast<unsigned int>((pieces + kPiecesABlock - 1) / kPiecesABlock), kThreads, 0,
           stream>>>(params, pieces);
  cuda::check(cudaGetLastError(), "flash_backward_grad_q");
}

}  // namespace xpuruntime::cuda_raw

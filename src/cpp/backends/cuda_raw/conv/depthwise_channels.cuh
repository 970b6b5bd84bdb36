// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cuda_raw/conv/depthwise_device.cuh"

// The route `channels`: each thread computes a span of results along a row for two channels, and
// reads x from where it lies; the cache holds what the rows above and below have read.
namespace xpuruntime::cuda_raw::conv {

/// Floats from the weights of one tap to those of the next: 64 channels, moved on so that storing
/// several taps of one channel meets several banks.
constexpr int kTapPitch = kSpanChannels + 2;

template <typename T, int kWindow>
__device__ __forceinline__ void load_taps(const DepthwiseConvArgs& args, std::int64_t channel,
                                          float* taps, int thread, int threads) {
  constexpr int kWeights = kWindow * kWindow;
  for (int item = thread; item < kWeights * kSpanChannels; item += threads) {
    const int one = item / kWeights;
    const int tap = item % kWeights;
    if (channel + one >= args.channels) break;
    const std::int64_t from = (channel + one) * args.weight_strides[0] +
                              tap / kWindow * args.weight_strides[1] +
                              tap % kWindow * args.weight_strides[2];
    taps[tap * kTapPitch + one] = widen(static_cast<const T*>(args.weight)[from]);
  }
}

/// Computes span number `span` of channels `channel` and `channel` + 1, whose weights are at
/// `taps`.
template <typename T, int kWindow, int kStride>
__device__ __forceinline__ void compute_span(const DepthwiseConvArgs& args, const SpanPlan& plan,
                                             std::int64_t channel, std::uint32_t span,
                                             const float* taps, float2 bias) {
  constexpr int kColumns = Span<kStride>::kColumns;
  constexpr int kInputs = (kColumns - 1) * kStride + kWindow;
  using Pair = Pack<T, 2>;
  const std::uint32_t line = span / plan.across;
  const auto height = static_cast<std::uint32_t>(args.out_size[0]);
  const int column = static_cast<int>(span - line * plan.across) * kColumns;
  const std::int64_t image = line / height;
  const int row = static_cast<int>(line % height);
  const int top = row * kStride - args.padding[0];
  const int left = column * kStride - args.padding[1];
  const T* const x = static_cast<const T*>(args.x) + image * args.x_strides[0] + channel;
  float2 sums[kColumns] = {};
#pragma unroll 1
  for (int i = 0; i < kWindow; ++i) {
    const int y = top + i;
    if (y < 0 || y >= args.size[0]) continue;
    const T* const from = x + y * args.x_strides[2] + left * args.x_strides[3];
    float2 values[kInputs];
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      values[j] = make_float2(0.0F, 0.0F);
      if (left + j < 0 || left + j >= args.size[1]) continue;
      const Pair pair = *reinterpret_cast<const Pair*>(from + j * args.x_strides[3]);
      values[j] = make_float2(widen(pair.values[0]), widen(pair.values[1]));
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const float2 weight = *reinterpret_cast<const float2*>(taps + (i * kWindow + j) * kTapPitch);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sums[k].x = fmaf(values[k * kStride + j].x, weight.x, sums[k].x);
        sums[k].y = fmaf(values[k * kStride + j].y, weight.y, sums[k].y);
      }
    }
  }
  T* const to = static_cast<T*>(args.out) + image * args.out_strides[0] + channel +
                row * args.out_strides[2] + column * args.out_strides[3];
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    if (column + k >= args.out_size[1]) break;
    const Pair pair{{narrow<T>(activate(sums[k].x + bias.x, args.activation)),
                     narrow<T>(activate(sums[k].y + bias.y, args.activation))}};
    *reinterpret_cast<Pair*>(to + k * args.out_strides[3]) = pair;
  }
}

template <typename T, int kWindow, int kStride>
__global__ void __launch_bounds__(kSpanWarps * 32)
    depthwise_channels(__grid_constant__ const DepthwiseConvArgs args,
                       __grid_constant__ const SpanPlan plan) {
  __shared__ float2 shared[kWindow * kWindow * kTapPitch / 2];
  float* const taps = reinterpret_cast<float*>(shared);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kSpanChannels;
  load_taps<T, kWindow>(args, first, taps, static_cast<int>(threadIdx.x),
                        static_cast<int>(blockDim.x));
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t channel = first + 2 * lane;
  if (channel >= args.channels) return;
  float2 bias = make_float2(0.0F, 0.0F);
  if (args.bias != nullptr) {
    const T* const from = static_cast<const T*>(args.bias) + channel * args.bias_stride;
    bias = make_float2(widen(from[0]), widen(from[args.bias_stride]));
  }
  std::uint32_t span = blockIdx.y * kSpanWarps + threadIdx.x / 32;
  for (; span < plan.spans; span += gridDim.y * kSpanWarps) {
    compute_span<T, kWindow, kStride>(args, plan, channel, span, taps + 2 * lane, bias);
  }
}

}  // namespace xpuruntime::cuda_raw::conv

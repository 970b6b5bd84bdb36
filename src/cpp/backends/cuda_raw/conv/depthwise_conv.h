// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace xpuruntime::cuda_raw {

enum class ConvType : std::uint8_t { fp32, fp16, bf16 };

/// Depthwise convolution: out[n, c] = activation(x[n, c] convolved with weight[c] + bias[c]), each
/// channel by itself. Sums are fp32 and are rounded once. All of one type. In the fast kernels
/// padding is zeros that are multiplied, so that an infinite weight makes NaN of it.
///
/// Strides are in elements and may be any; out does not overlap itself or an input. Every layout is
/// served. Kernels of 3x3, 5x5 and 7x7 with stride 1 or 2 and no dilation are fast where columns
/// are adjacent, and where channels are adjacent, even in number and lie in aligned pairs;
/// `depthwise_conv_route` says which kernel it is.
///
/// Only enqueues on the stream, allocates nothing, may be captured. The same call gives the same
/// bits each time.
struct DepthwiseConvArgs {
  const void* x = nullptr;       ///< [batch, channels, height, width]
  const void* weight = nullptr;  ///< [channels, kernel height, kernel width]
  const void* bias = nullptr;    ///< [channels], or null: zeros
  void* out = nullptr;           ///< [batch, channels, out height, out width]
  std::int64_t batch = 0, channels = 0;
  std::int64_t size[2] = {};      ///< height and width of x
  std::int64_t out_size[2] = {};  ///< of out
  std::int64_t kernel[2] = {};
  std::int32_t stride[2] = {1, 1};
  std::int32_t dilation[2] = {1, 1};
  std::int32_t padding[2] = {};  ///< top, left
  std::int64_t x_strides[4] = {};
  std::int64_t weight_strides[3] = {};
  std::int64_t bias_stride = 0;
  std::int64_t out_strides[4] = {};
  int activation = 0;  ///< 0 none, 1 ReLU, 2 GELU, 3 GELU by tanh, 4 SiLU
  ConvType type = ConvType::fp32;
};

/// rows: columns are adjacent, tiles in shared memory. channels: channels are adjacent, two a
/// thread. general: one result a thread, whatever the sizes and strides.
enum class DepthwiseRoute : std::uint8_t { rows, channels, general };

/// Pure: looks at the alignment of addresses, and touches no device.
DepthwiseRoute depthwise_conv_route(const DepthwiseConvArgs& args) noexcept;

/// Empty, or one sentence saying why the call cannot be served and what to change. Pure.
std::string depthwise_conv_refusal(const DepthwiseConvArgs& args, int cc_major);

/// Enqueues on `stream`, nothing where out has no element. The arguments must be ones that
/// depthwise_conv_refusal accepts. Throws CudaError when the launch fails.
void depthwise_conv(const DepthwiseConvArgs& args, int sm_count, cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw

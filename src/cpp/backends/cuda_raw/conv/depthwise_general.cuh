// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda_raw/conv/depthwise_device.cuh"

// The route `general`: one result a thread at a time, with any sizes and strides.
namespace xpuruntime::cuda_raw::conv {

/// Takes the dimensions of `out` off an index, the last first.
template <typename Index>
__device__ __forceinline__ std::int64_t take_off(Index& index, std::int64_t size) {
  const Index left = index / static_cast<Index>(size);
  const auto at = static_cast<std::int64_t>(index - left * static_cast<Index>(size));
  index = left;
  return at;
}

template <typename T, typename Index>
__device__ __forceinline__ void compute_result(const DepthwiseConvArgs& args, Index index,
                                               bool channels_adjacent) {
  std::int64_t channel = 0;
  if (channels_adjacent) channel = take_off(index, args.channels);
  const std::int64_t column = take_off(index, args.out_size[1]);
  const std::int64_t row = take_off(index, args.out_size[0]);
  if (!channels_adjacent) channel = take_off(index, args.channels);
  const auto image = static_cast<std::int64_t>(index);
  const T* const x =
      static_cast<const T*>(args.x) + image * args.x_strides[0] + channel * args.x_strides[1];
  const T* const weight = static_cast<const T*>(args.weight) + channel * args.weight_strides[0];
  float sum = 0.0F;
  for (std::int64_t i = 0; i < args.kernel[0]; ++i) {
    const std::int64_t y = row * args.stride[0] + i * args.dilation[0] - args.padding[0];
    if (y < 0 || y >= args.size[0]) continue;
    for (std::int64_t j = 0; j < args.kernel[1]; ++j) {
      const std::int64_t z = column * args.stride[1] + j * args.dilation[1] - args.padding[1];
      if (z < 0 || z >= args.size[1]) continue;
      sum = fmaf(widen(x[y * args.x_strides[2] + z * args.x_strides[3]]),
                 widen(weight[i * args.weight_strides[1] + j * args.weight_strides[2]]), sum);
    }
  }
  if (args.bias != nullptr) {
    sum += widen(static_cast<const T*>(args.bias)[channel * args.bias_stride]);
  }
  static_cast<T*>(args.out)[image * args.out_strides[0] + channel * args.out_strides[1] +
                            row * args.out_strides[2] + column * args.out_strides[3]] =
      narrow<T>(activate(sum, args.activation));
}

__global__ void __launch_bounds__(256)
    depthwise_general(__grid_constant__ const DepthwiseConvArgs args, std::int64_t results,
                      bool channels_adjacent) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  with_type(args.type, [&](auto* model) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(model)>>;
    for (std::int64_t index = first; index < results; index += step) {
      // Division of 32 bits is several times as fast.
      if (results <= INT32_MAX) {
        compute_result<T>(args, static_cast<std::uint32_t>(index), channels_adjacent);
      } else {
        compute_result<T>(args, static_cast<std::uint64_t>(index), channels_adjacent);
      }
    }
  });
}

}  // namespace xpuruntime::cuda_raw::conv

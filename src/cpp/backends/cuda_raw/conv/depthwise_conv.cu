// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cstdint>

#include "cuda/check.h"
#include "cuda_raw/conv/depthwise_channels.cuh"
#include "cuda_raw/conv/depthwise_conv.h"
#include "cuda_raw/conv/depthwise_general.cuh"
#include "cuda_raw/conv/depthwise_rows.cuh"

namespace xpuruntime::cuda_raw {
namespace {

using namespace conv;

constexpr int kKibibytes48 = 48 * 1024;

bool stores_in_fours(const DepthwiseConvArgs& args) {
  const std::uintptr_t bytes = args.type == ConvType::fp32 ? 16 : 8;
  return args.out_size[1] % 4 == 0 && args.out_strides[0] % 4 == 0 &&
         args.out_strides[1] % 4 == 0 && args.out_strides[2] % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.out) % bytes == 0;
}

template <int kWindow, int kStride>
void launch_rows(const DepthwiseConvArgs& args, int sm_count, cudaStream_t stream) {
  static_assert(sizeof(PlaneData<kWindow, kStride>) + kTileBytes <= kKibibytes48);
  const TilePlan plan = plan_tiles<kWindow, kStride>(args, sm_count);
  depthwise_rows<kWindow, kStride>
      <<<static_cast<unsigned>(plan.blocks()), static_cast<unsigned>(plan.threads()),
         static_cast<std::size_t>(plan.floats()) * sizeof(float), stream>>>(args, plan,
                                                                            stores_in_fours(args));
}

template <int kWindow, int kStride>
void launch_channels(const DepthwiseConvArgs& args, int sm_count, cudaStream_t stream) {
  static_assert(kWindow * kWindow * kTapPitch * sizeof(float) <= kKibibytes48);
  const SpanPlan plan = plan_spans<kStride>(args, sm_count);
  const dim3 grid(static_cast<unsigned>(plan.chunks), plan.blocks);
  constexpr unsigned kThreads = kSpanWarps * 32;
  switch (args.type) {
    case ConvType::fp32:
      depthwise_channels<float, kWindow, kStride><<<grid, kThreads, 0, stream>>>(args, plan);
      break;
    case ConvType::fp16:
      depthwise_channels<__half, kWindow, kStride><<<grid, kThreads, 0, stream>>>(args, plan);
      break;
    case ConvType::bf16:
      depthwise_channels<__nv_bfloat16, kWindow, kStride>
          <<<grid, kThreads, 0, stream>>>(args, plan);
      break;
  }
}

void launch_general(const DepthwiseConvArgs& args, int sm_count, cudaStream_t stream) {
  constexpr unsigned kThreads = 256;
  constexpr std::int64_t kBlocksOfMultiprocessor = 32;
  const std::int64_t results = args.batch * args.channels * args.out_size[0] * args.out_size[1];
  const std::int64_t blocks =
      std::min(ceil_div(results, kThreads), kBlocksOfMultiprocessor * std::max(sm_count, 1));
  const bool channels_adjacent = args.channels > 1 && args.out_strides[1] == 1;
  depthwise_general<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args, results,
                                                                            channels_adjacent);
}

template <int kWindow, int kStride>
void launch_fast(DepthwiseRoute route, const DepthwiseConvArgs& args, int sm_count,
                 cudaStream_t stream) {
  if (route == DepthwiseRoute::rows) {
    launch_rows<kWindow, kStride>(args, sm_count, stream);
  } else {
    launch_channels<kWindow, kStride>(args, sm_count, stream);
  }
}

template <int kWindow>
void launch_window(DepthwiseRoute route, const DepthwiseConvArgs& args, int sm_count,
                   cudaStream_t stream) {
  if (args.stride[0] == 1) {
    launch_fast<kWindow, 1>(route, args, sm_count, stream);
  } else {
    launch_fast<kWindow, 2>(route, args, sm_count, stream);
  }
}

}  // namespace

void depthwise_conv(const DepthwiseConvArgs& args, int sm_count, cudaStream_t stream) {
  if (args.batch == 0 || args.channels == 0 || args.out_size[0] == 0 || args.out_size[1] == 0) {
    return;
  }
  const DepthwiseRoute route = depthwise_conv_route(args);
  if (route == DepthwiseRoute::general) {
    launch_general(args, sm_count, stream);
  } else if (args.kernel[0] == 3) {
    launch_window<3>(route, args, sm_count, stream);
  } else if (args.kernel[0] == 5) {
    launch_window<5>(route, args, sm_count, stream);
  } else {
    launch_window<7>(route, args, sm_count, stream);
  }
  cuda::check(cudaGetLastError(), "depthwise_conv");
}

}  // namespace xpuruntime::cuda_raw

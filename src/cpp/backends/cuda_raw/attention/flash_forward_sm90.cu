// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cuda/check.h"
#include "cuda_raw/attention/flash_forward.h"
#include "cuda_raw/attention/flash_forward_sm90.cuh"
#include "cuda_raw/tensor_map.h"

namespace xpuruntime::cuda_raw {
namespace {

constexpr std::int64_t kLongRows = 6144;  // of keys, with a head_dim of 97 to 128

template <typename S, bool kBfloat16, bool kGeneral>
void launch(const FlashForwardArgs& args, int sm_count, cudaStream_t stream) {
  constexpr std::int64_t kCacheBytes = 32 << 20;  // of the L2 for keys and values
  const std::int64_t q_lengths[4] = {args.batch, args.heads, args.q_length, args.head_dim};
  const std::int64_t kv_lengths[4] = {args.batch, args.kv_heads, args.kv_length, args.head_dim};
  hopper::TensorMaps maps;
  maps.q = encode_heads_map("q", args.q, kBfloat16, q_lengths, args.q_strides, 64);
  maps.k = encode_heads_map("k", args.k, kBfloat16, kv_lengths, args.k_strides, S::kColumns);
  maps.v = encode_heads_map("v", args.v, kBfloat16, kv_lengths, args.v_strides, S::kColumns);

  const std::int64_t group = args.heads / args.kv_heads;
  const std::int64_t head_bytes = args.kv_length * args.head_dim * 4;
  const std::int64_t all_heads = args.batch * args.heads;
  const std::int64_t cached_heads = std::max<std::int64_t>(kCacheBytes / head_bytes, 1) * group;
  const std::int64_t sections =
      cached_heads >= all_heads ? 1 : 2 * ((all_heads + 2 * cached_heads - 1) / (2 * cached_heads));
  hopper::Problem problem{};
  problem.out = args.out;
  std::copy_n(args.out_strides, 3, problem.out_strides);
  problem.head_dim = args.head_dim;
  problem.lse = args.lse;
  problem.heads = static_cast<int>(args.heads);
  problem.heads_per_kv_head = static_cast<int>(group);
  problem.q_length = static_cast<int>(args.q_length);
  problem.kv_length = static_cast<int>(args.kv_length);
  problem.row_blocks = static_cast<int>((args.q_length + S::kRows - 1) / S::kRows);
  problem.items = static_cast<int>(problem.row_blocks * all_heads);
  problem.sections = static_cast<int>(sections);
  problem.heads_a_section = static_cast<int>((all_heads + sections - 1) / sections);
  problem.causal = args.causal;
  problem.diagonal = 1 + (args.causal_bottom_right ? problem.kv_length - problem.q_length : 0);
  problem.scale_log2 = args.scale * kLog2E;
  problem.extras = flash_extras(args);

  constexpr int kSharedBytes = static_cast<int>(sizeof(hopper::Shared<S>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  const void* kernel = reinterpret_cast<const void*>(&hopper::forward<S, kBfloat16, kGeneral>);
  cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "cudaFuncSetAttribute");
  const int blocks = std::min(problem.items, sm_count);
  void* parameters[] = {&maps, &problem};
  cuda::check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                               parameters, kSharedBytes, stream),
              "cudaLaunchKernel of the attention forward kernel");
}

template <typename S, bool kGeneral>
void launch(const FlashForwardArgs& args, int sm_count, cudaStream_t stream) {
  args.bfloat16 ? launch<S, true, kGeneral>(args, sm_count, stream)
                : launch<S, false, kGeneral>(args, sm_count, stream);
}

template <typename Plain, typename General = Plain>
void choose(const FlashForwardArgs& args, int sm_count, cudaStream_t stream) {
  const bool general = args.mask_kind != kMaskNone || args.dropout_p > 0.0f || !(args.scale > 0.0f);
  general ? launch<General, true>(args, sm_count, stream)
          : launch<Plain, false>(args, sm_count, stream);
}

}  // namespace

void flash_forward_wgmma(const FlashForwardArgs& args, int sm_count, cudaStream_t stream) {
  if (args.batch * args.heads * args.q_length == 0) return;
  using hopper::Shape;
  if (args.head_dim <= 64)
    return choose<Shape<64, 3, 128>, Shape<64, 2, 128>>(args, sm_count, stream);
  if (args.head_dim <= 96) return choose<Shape<96, 2, 128>>(args, sm_count, stream);
  if (args.head_dim <= 128) {
    // Long rows gain more from fewer, larger tiles than is lost on the last of them.
    return args.kv_length < kLongRows
               ? choose<Shape<128, 2, 128>>(args, sm_count, stream)
               : choose<Shape<128, 2, 176>, Shape<128, 2, 128>>(args, sm_count, stream);
  }
  if (args.head_dim <= 192) return choose<Shape<192, 2, 112>>(args, sm_count, stream);
  choose<Shape<256, 2, 80>>(args, sm_count, stream);
}

}  // namespace xpuruntime::cuda_raw

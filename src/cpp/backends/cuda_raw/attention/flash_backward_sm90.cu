// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda/check.h"
#include "cuda_raw/attention/flash_backward_sm90.cuh"
#include "cuda_raw/tensor_map.h"

namespace xpuruntime::cuda_raw {
namespace {

// The copy engine takes strides from 16 bytes to below 2^40; 0 and negative ones it does not.
bool copyable(const std::int64_t (&strides)[3], const std::int64_t (&lengths)[3]) {
  for (int i = 0; i < 3; ++i) {
    if (lengths[i] > 1 && (strides[i] <= 0 || strides[i] >= (std::int64_t{1} << 38))) return false;
  }
  return true;
}

template <bool kBfloat16, int kColumns>
void launch(FlashBackwardParams& params, cudaStream_t stream) {
  using Shape = FlashBackwardSm90Shape<kColumns>;
  const FlashBackwardArgs& args = params.args;
  const std::int64_t q_lengths[4] = {args.batch, args.heads, args.q_length, args.head_dim};
  const std::int64_t kv_lengths[4] = {args.batch, args.kv_heads, args.kv_length, args.head_dim};
  FlashBackwardMaps maps;
  maps.q = encode_heads_map("q", args.q, kBfloat16, q_lengths, args.q_strides, Shape::kRows);
  maps.k = encode_heads_map("k", args.k, kBfloat16, kv_lengths, args.k_strides, Shape::kKeys);
  maps.v = encode_heads_map("v", args.v, kBfloat16, kv_lengths, args.v_strides, Shape::kKeys);
  maps.grad_out = encode_heads_map("grad_out", args.grad_out, kBfloat16, q_lengths,
                                   args.grad_out_strides, Shape::kRows);
  params.columns = kColumns;
  params.kv_blocks = (params.kv_length + Shape::kKeys - 1) / Shape::kKeys;
  const std::int64_t blocks = args.batch * args.kv_heads * params.kv_blocks;
  const auto kernel = flash_backward_sm90_kernel<kBfloat16, Shape>;
  cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
      "cudaFuncSetAttribute");
  kernel<<<static_cast<unsigned int>(blocks), Shape::kThreads, Shape::kBytes, stream>>>(params,
                                                                                        maps);
  cuda::check(cudaGetLastError(), "flash_backward_sm90_kernel");
}

}  // namespace

bool flash_backward_sm90_serves(const FlashBackwardArgs& args, const FlashBackwardDevice& device) {
  const std::int64_t rows[3] = {args.batch, args.heads, args.q_length};
  const std::int64_t keys[3] = {args.batch, args.kv_heads, args.kv_length};
  return device.cc_major == 9 && device.cc_minor == 0 && args.mask_kind == 0 &&
         args.dropout_p == 0.0F && args.head_dim <= 128 &&
         args.batch * args.heads * args.q_length * args.kv_length > 0 &&
         copyable(args.q_strides, rows) && copyable(args.k_strides, keys) &&
         copyable(args.v_strides, keys) && copyable(args.grad_out_strides, rows);
}

void flash_backward_sm90(FlashBackwardParams& params, cudaStream_t stream) {
  if (params.args.head_dim <= 64) {
    return params.args.bfloat16 ? launch<true, 64>(params, stream)
                                : launch<false, 64>(params, stream);
  }
  return params.args.bfloat16 ? launch<true, 128>(params, stream)
                              : launch<false, 128>(params, stream);
}

}  // namespace xpuruntime::cuda_raw

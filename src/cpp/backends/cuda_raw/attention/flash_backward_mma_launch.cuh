// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda/check.h"
#include "cuda_raw/attention/flash_backward_mma.cuh"

namespace xpuruntime::cuda_raw {

// Two variants of a width: rows of q prefetched, for devices with the shared memory for it, and a
// smaller one for the others: compute capability 8.6, 8.9 and 12 (99 KB), and for 256 columns 8.0
// and 8.7 (163 KB).
using FlashBackwardMma64 = FlashBackwardMmaShape<64, 64, 2>;
using FlashBackwardMma96 = FlashBackwardMmaShape<96, 64, 2>;
using FlashBackwardMma128 = FlashBackwardMmaShape<128, 64, 2>;
using FlashBackwardMma192 = FlashBackwardMmaShape<192, 64, 2>;
using FlashBackwardMma256 = FlashBackwardMmaShape<256, 64, 2>;
using FlashBackwardMmaSmall96 = FlashBackwardMmaShape<96, 32, 1>;
using FlashBackwardMmaSmall128 = FlashBackwardMmaShape<128, 32, 1>;
using FlashBackwardMmaSmall192 = FlashBackwardMmaShape<192, 32, 1>;
using FlashBackwardMmaSmall256 = FlashBackwardMmaShape<256, 64, 1>;

template <bool kBfloat16, typename Shape, bool kGeneral>
void launch_flash_backward_mma(FlashBackwardParams params, cudaStream_t stream) {
  const auto kernel = flash_backward_mma_kernel<kBfloat16, Shape, kGeneral>;
  cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
      "cudaFuncSetAttribute");
  params.kv_blocks = (params.kv_length + Shape::kKeys - 1) / Shape::kKeys;
  const std::int64_t blocks = params.args.batch * params.args.kv_heads * params.kv_blocks;
  if (blocks == 0) return;
  kernel<<<static_cast<unsigned int>(blocks), Shape::kThreads, Shape::kBytes, stream>>>(params);
  cuda::check(cudaGetLastError(), "flash_backward_mma_kernel");
}

template <bool kBfloat16>
void choose_flash_backward_mma(const FlashBackwardParams& params, int shared_memory,
                               cudaStream_t stream) {
  const auto run = [&]<typename Large, typename Small>() {
    if constexpr (!std::is_same_v<Large, Small>) {
      if (Large::kBytes > shared_memory) {
        return launch_flash_backward_mma<kBfloat16, Small, true>(params, stream);
      }
    }
    const bool general = params.args.mask_kind != 0 || params.args.dropout_p != 0.0F;
    return general ? launch_flash_backward_mma<kBfloat16, Large, true>(params, stream)
                   : launch_flash_backward_mma<kBfloat16, Large, false>(params, stream);
  };
  switch (params.columns) {
    case 64:
      return run.template operator()<FlashBackwardMma64, FlashBackwardMma64>();
    case 96:
      return run.template operator()<FlashBackwardMma96, FlashBackwardMmaSmall96>();
    case 128:
      return run.template operator()<FlashBackwardMma128, FlashBackwardMmaSmall128>();
    case 192:
      return run.template operator()<FlashBackwardMma192, FlashBackwardMmaSmall192>();
    default:
      return run.template operator()<FlashBackwardMma256, FlashBackwardMmaSmall256>();
  }
}

void flash_backward_mma_bf16(const FlashBackwardParams& params, int shared_memory,
                             cudaStream_t stream);
void flash_backward_mma_fp16(const FlashBackwardParams& params, int shared_memory,
                             cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw

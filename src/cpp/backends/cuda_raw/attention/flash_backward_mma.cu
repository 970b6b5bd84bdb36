// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/attention/flash_backward_mma_launch.cuh"

namespace xpuruntime::cuda_raw {

int flash_backward_mma_shared_memory(int columns) {
  switch (columns) {
    case 64:
      return FlashBackwardMma64::kBytes;
    case 96:
      return FlashBackwardMmaSmall96::kBytes;
    case 128:
      return FlashBackwardMmaSmall128::kBytes;
    case 192:
      return FlashBackwardMmaSmall192::kBytes;
    default:
      return FlashBackwardMmaSmall256::kBytes;
  }
}

void flash_backward_mma(const FlashBackwardParams& params, int shared_memory, cudaStream_t stream) {
  if (params.args.bfloat16) {
    flash_backward_mma_bf16(params, shared_memory, stream);
  } else {
    flash_backward_mma_fp16(params, shared_memory, stream);
  }
}

}  // namespace xpuruntime::cuda_raw

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/attention/flash_backward_mma_launch.cuh"

namespace xpuruntime::cuda_raw {

void flash_backward_mma_fp16(const FlashBackwardParams& params, int shared_memory,
                             cudaStream_t stream) {
  choose_flash_backward_mma<false>(params, shared_memory, stream);
}

}  // namespace xpuruntime::cuda_raw

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime {

class KernelRegistry;

/// Our own kernels for CUDA devices from compute capability 8.0: "cuda_raw.skinny" for matmul,
/// "cuda_raw.depthwise_conv" for convolution, and "cuda_raw.flash_attention_v2",
/// "cuda_raw.layer_norm" and "cuda_raw.rms_norm", these three with their gradients under the same
/// ids.
void register_cuda_raw(KernelRegistry& registry);

}  // namespace xpuruntime

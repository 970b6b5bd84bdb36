// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime {

class KernelRegistry;

/// "cudnn.sdpa" for attention and its backward, and "cudnn.conv_heuristic", "cudnn.conv_default"
/// and "cudnn.conv_exhaustive" for convolution, on CUDA devices. Opens no library: that happens
/// when a kernel is prepared, or its backend is asked whether it is available.
void register_cudnn(KernelRegistry& registry);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime {

class KernelRegistry;

/// "cublas.cublasLt" and "cublas.cublas" for matmul on CUDA devices. Opens no library: that
/// happens when a kernel is prepared, or its backend is asked whether it is available.
void register_cublas(KernelRegistry& registry);

}  // namespace xpuruntime

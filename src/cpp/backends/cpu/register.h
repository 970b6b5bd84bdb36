// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime {

class KernelRegistry;

/// Kernels for the CPU, in the order in which they should be tried: "cpu.blas" and "cpu.gemm_conv"
/// by OpenBLAS, "cpu.vectorised" for norms, and last, for every operation, "cpu.reference", which
/// is plain and exact and serves all that can be described.
void register_cpu(KernelRegistry& registry);

}  // namespace xpuruntime

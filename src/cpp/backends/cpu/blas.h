// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

// Kernels that call OpenBLAS, fp32 and fp64. A product is cut into blocks for the threads of
// thread_pool.h, and bias and activation follow while a block is in the cache.

/// "cpu.blas"
Support blas_matmul_supports(const OpDesc& op);
std::unique_ptr<const Kernel> blas_matmul(const OpDesc& op);

/// "cpu.gemm_conv": the inputs of some rows of the result are laid out as a matrix, whose product
/// with the weights they are; 1 x 1 kernels read x in place.
Support gemm_conv_supports(const OpDesc& op);
std::unique_ptr<const Kernel> gemm_conv(const OpDesc& op);
/// Its gradients, by the same matrices; see conv_matrix.h. The same bits in every run, with as many
/// threads.
Support gemm_conv_input_gradient_supports(const OpDesc& op);
std::unique_ptr<const Kernel> gemm_conv_input_gradient(const OpDesc& op);
Support gemm_conv_weight_gradient_supports(const OpDesc& op);
std::unique_ptr<const Kernel> gemm_conv_weight_gradient(const OpDesc& op);

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

// "cpu.reference": each operation by its definition, in double precision, rounded once at the end.
// Any dtype, strides and sizes. What the other kernels are tested against.

std::unique_ptr<const Kernel> reference_matmul(const OpDesc& op);
std::unique_ptr<const Kernel> reference_attention(const OpDesc& op);
/// Computes the weights again from q, k and the mask instead of taking `out` and `lse`.
std::unique_ptr<const Kernel> reference_attention_backward(const OpDesc& op);
/// Layer norm and RMS norm. The statistics are those of x + residual before it is rounded to `sum`.
std::unique_ptr<const Kernel> reference_norm(const OpDesc& op);
std::unique_ptr<const Kernel> reference_norm_backward(const OpDesc& op);
std::unique_ptr<const Kernel> reference_conv(const OpDesc& op);
std::unique_ptr<const Kernel> reference_conv_input_gradient(const OpDesc& op);
std::unique_ptr<const Kernel> reference_conv_weight_gradient(const OpDesc& op);

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

// "cpu.vectorised": norms in fp32 arithmetic with the widest vectors that the processor has, rows
// over several threads. The sums over rows of the backward are taken over 64 rows at a time in fp32
// and those in fp64, so the number of threads does not change a bit.

Support vectorised_norm_supports(const OpDesc& op);
std::unique_ptr<const Kernel> vectorised_norm(const OpDesc& op);
Support vectorised_norm_backward_supports(const OpDesc& op);
std::unique_ptr<const Kernel> vectorised_norm_backward(const OpDesc& op);

}  // namespace xpuruntime::cpu

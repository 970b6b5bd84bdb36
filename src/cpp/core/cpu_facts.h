// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>
#include <vector>

namespace xpuruntime::cpu {

/// One folder of core/cpu_* is built and implements these.

/// The processor's own name; empty when it does not tell.
std::string processor_name();
/// Instruction set extensions that the processor has and the system enables.
std::vector<std::string> features();

}  // namespace xpuruntime::cpu

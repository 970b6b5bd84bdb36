// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu_facts.h"

namespace xpuruntime::cpu {

std::string processor_name() { return {}; }

std::vector<std::string> features() { return {}; }

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime {

class KernelRegistry;

/// "null.null", for every operation on the CPU: the outputs become zeros. For tests, and to see
/// what a call costs without its kernel; runs only when it is asked for by name.
void register_null(KernelRegistry& registry);

}  // namespace xpuruntime

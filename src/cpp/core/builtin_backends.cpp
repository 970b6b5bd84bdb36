// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/register.h"
#include "null/register.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {

// In the order in which `first_supported` tries them.
void register_builtin_backends(KernelRegistry& registry) {
  register_cpu(registry);
  register_null(registry);
}

}  // namespace xpuruntime

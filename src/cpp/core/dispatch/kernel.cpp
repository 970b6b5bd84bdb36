// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/kernel.h"

namespace xpuruntime {

Support KernelDefinition::favoured(const OpDesc& /*op*/, const DeviceInfo& /*device*/) const {
  return Support::yes();
}

std::vector<std::string> KernelDefinition::configs(const OpDesc& /*op*/,
                                                   const DeviceInfo& /*device*/,
                                                   std::size_t most) const {
  return std::vector<std::string>(most > 0 ? 1 : 0);
}

}  // namespace xpuruntime

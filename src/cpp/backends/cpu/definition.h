// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

/// What distinguishes the kernels of this backend.
struct KernelFacts {
  const char* id;
  OpKind op;
  const char* description;
  const char* limits;
  std::vector<std::string> families;
  /// Of operations on the CPU whose dtypes are all known here.
  Support (*supports)(const OpDesc& op);
  std::unique_ptr<const Kernel> (*prepare)(const OpDesc& op);
};

std::shared_ptr<const KernelDefinition> define(std::shared_ptr<const KernelBackend> backend,
                                               KernelFacts facts);

}  // namespace xpuruntime::cpu

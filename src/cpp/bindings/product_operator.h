// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>

namespace xpuruntime::bindings {

/// What the name of an operator of PyTorch's, such as "addmm.out", and a dispatch key say.
struct ProductOperator {
  ProductOperator(const std::string& name, const std::string& key);

  std::string packet;      ///< "addmm"
  bool into = false;       ///< writes into `out`
  bool adds = false;       ///< has an addend
  void* kernel = nullptr;  ///< PyTorch's C function for it, where there is one
};

}  // namespace xpuruntime::bindings

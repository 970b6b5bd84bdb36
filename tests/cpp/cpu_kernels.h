// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cpu/register.h"
#include "op_arrays.h"
#include "xpuruntime/shared_library.h"

namespace xpuruntime::testing {

/// Of one rounding to the dtype.
inline double epsilon(DType dtype) {
  if (dtype == kFp64) return 1e-12;
  if (dtype == kFp32) return 0x1p-23;
  return dtype == kFp16 ? 0x1p-11 : 0x1p-8;
}

/// With the kernels of the backend cpu alone, and the stand-in for OpenBLAS.
inline const KernelRegistry& cpu_registry() {
  static const KernelRegistry* const made = [] {
    SharedLibrary::set_search_folders({PLAIN_BLAS_FOLDER});
    auto* fresh = new KernelRegistry(false);
    register_cpu(*fresh);
    return fresh;
  }();
  return *made;
}

}  // namespace xpuruntime::testing

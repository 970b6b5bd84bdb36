// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>

namespace xpuruntime::cpu {

/// The functions of OpenBLAS that are used, from the wheel `scipy-openblas32`. It is set to use
/// one thread for itself: work is shared out by thread_pool.h, and it may be called from several
/// threads at once.
struct OpenBlas {
  using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float* a, int lda, const float* b, int ldb, float beta, float* c,
                         int ldc);
  using Dgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, double alpha,
                         const double* a, int lda, const double* b, int ldb, double beta, double* c,
                         int ldc);
  Sgemm sgemm = nullptr;
  Dgemm dgemm = nullptr;
  std::string version;  ///< with the processor it has chosen its code for

  /// Opens it the first time. Throws UnsupportedOperationError as SharedLibrary::open does.
  static const OpenBlas& get();
};

}  // namespace xpuruntime::cpu

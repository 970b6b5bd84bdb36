// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The functions of the wheel scipy-openblas32 that are used, by their definition. Built with the
// sanitizers of the tests, it shows what a product reads and writes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

void require(bool fact, const char* what) {
  if (fact) return;
  (void)std::fprintf(stderr, "plain_blas: %s\n", what);
  std::abort();
}

template <typename T>
void gemm(int order, int trans_a, int trans_b, int m, int n, int k, T alpha, const T* a, int lda,
          const T* b, int ldb, T beta, T* c, int ldc) {
  require(order == 101, "the order is row-major");
  require((trans_a == 111 || trans_a == 112) && (trans_b == 111 || trans_b == 112), "transposes");
  require(lda >= (trans_a == 111 ? k : m) && lda >= 1, "lda is at least a row");
  require(ldb >= (trans_b == 111 ? n : k) && ldb >= 1, "ldb is at least a row");
  require(ldc >= n && ldc >= 1, "ldc is at least a row");
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; ++p) {
        const T left = trans_a == 111 ? a[i * lda + p] : a[p * lda + i];
        const T right = trans_b == 111 ? b[p * ldb + j] : b[j * ldb + p];
        sum += static_cast<double>(left) * static_cast<double>(right);
      }
      T& to = c[i * ldc + j];
      to = static_cast<T>(static_cast<double>(alpha) * sum) + (beta == T{0} ? T{0} : beta * to);
    }
  }
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) void scipy_cblas_sgemm(int order, int ta, int tb, int m,
                                                              int n, int k, float alpha,
                                                              const float* a, int lda,
                                                              const float* b, int ldb, float beta,
                                                              float* c, int ldc) {
  gemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
__attribute__((visibility("default"))) void scipy_cblas_dgemm(int order, int ta, int tb, int m,
                                                              int n, int k, double alpha,
                                                              const double* a, int lda,
                                                              const double* b, int ldb, double beta,
                                                              double* c, int ldc) {
  gemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
__attribute__((visibility("default"))) const char* scipy_openblas_get_config() { return "plain"; }
__attribute__((visibility("default"))) const char* scipy_openblas_get_corename() { return "any"; }
__attribute__((visibility("default"))) void scipy_openblas_set_num_threads(int threads) {
  require(threads == 1, "one thread is asked for");
}
}

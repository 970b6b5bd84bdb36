// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/gemm.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpu/activation.h"
#include "cpu/vector_code.h"

namespace xpuruntime::cpu {
namespace {

// Codes of the C interface of BLAS.
constexpr int kRowMajor = 101;
constexpr int kPlain = 111;
constexpr int kTransposed = 112;

void gemm(const OpenBlas& blas, int ta, int tb, int m, int n, int k, const float* a, int lda,
          const float* b, int ldb, float beta, float* c, int ldc) {
  blas.sgemm(kRowMajor, ta, tb, m, n, k, 1.0F, a, lda, b, ldb, beta, c, ldc);
}
void gemm(const OpenBlas& blas, int ta, int tb, int m, int n, int k, const double* a, int lda,
          const double* b, int ldb, double beta, double* c, int ldc) {
  blas.dgemm(kRowMajor, ta, tb, m, n, k, 1.0, a, lda, b, ldb, beta, c, ldc);
}

struct Rows {
  std::int64_t rows, columns, stride;
};

void finish(float* data, const Rows& at, const float* row_bias, const float* column_bias,
            Activation activation) {
  vector_code().finish({.data = data,
                        .rows = at.rows,
                        .columns = at.columns,
                        .stride = at.stride,
                        .row_bias = row_bias,
                        .column_bias = column_bias,
                        .activation = activation});
}
void finish(double* data, const Rows& at, const double* row_bias, const double* column_bias,
            Activation activation) {
  for (std::int64_t i = 0; i < at.rows; ++i) {
    double* const row = data + i * at.stride;
    for (std::int64_t j = 0; j < at.columns; ++j) {
      double value = row[j];
      if (row_bias != nullptr) value += row_bias[i];
      if (column_bias != nullptr) value += column_bias[j];
      row[j] = activate(activation, value);
    }
  }
}

template <typename T>
const T* at(const T* data, const MatrixLayout& layout, std::int64_t row, std::int64_t column) {
  return layout.transposed ? data + column * layout.stride + row
                           : data + row * layout.stride + column;
}

}  // namespace

std::optional<MatrixLayout> matrix_layout(std::int64_t rows, std::int64_t columns,
                                          std::int64_t row_stride, std::int64_t column_stride) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  if (rows > kMost || columns > kMost) return std::nullopt;
  if (rows == 0 || columns == 0) return MatrixLayout{false, std::max<std::int64_t>(columns, 1)};
  const auto lies = [](std::int64_t outer, std::int64_t inner, std::int64_t outer_stride,
                       std::int64_t inner_stride) -> std::optional<std::int64_t> {
    if (inner > 1 && inner_stride != 1) return std::nullopt;
    const std::int64_t least = std::max<std::int64_t>(inner, 1);
    if (outer <= 1) return least;
    if (outer_stride < least || outer_stride > kMost) return std::nullopt;
    return outer_stride;
  };
  if (const auto stride = lies(rows, columns, row_stride, column_stride)) {
    return MatrixLayout{false, *stride};
  }
  if (const auto stride = lies(columns, rows, column_stride, row_stride)) {
    return MatrixLayout{true, *stride};
  }
  return std::nullopt;
}

template <typename T>
void multiply_block(const OpenBlas& blas, const Product<T>& product, std::int64_t row,
                    std::int64_t rows, std::int64_t column, std::int64_t columns) {
  if (rows == 0 || columns == 0) return;
  T* const c = const_cast<T*>(at<T>(product.c, product.c_layout, row, column));
  const T* a = at(product.a, product.a_layout, row, 0);
  const T* b = at(product.b, product.b_layout, 0, column);
  bool transpose_a = product.a_layout.transposed;
  bool transpose_b = product.b_layout.transposed;
  auto lda = static_cast<int>(product.a_layout.stride);
  auto ldb = static_cast<int>(product.b_layout.stride);
  const T* row_bias = product.row_bias == nullptr ? nullptr : product.row_bias + row;
  const T* column_bias = product.column_bias == nullptr ? nullptr : product.column_bias + column;
  if (product.c_layout.transposed) {
    // c^T = b^T a^T
    std::swap(a, b);
    std::swap(lda, ldb);
    std::swap(rows, columns);
    std::swap(row_bias, column_bias);
    std::swap(transpose_a, transpose_b);
    transpose_a = !transpose_a;
    transpose_b = !transpose_b;
  }
  const std::int64_t ldc = product.c_layout.stride;
  if (product.k == 0) {
    for (std::int64_t i = 0; i < rows && !product.accumulate; ++i) {
      std::fill(c + i * ldc, c + i * ldc + columns, T{0});
    }
  } else {
    gemm(blas, transpose_a ? kTransposed : kPlain, transpose_b ? kTransposed : kPlain,
         static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(product.k), a, lda, b,
         ldb, product.accumulate ? T{1} : T{0}, c, static_cast<int>(ldc));
  }
  if (row_bias == nullptr && column_bias == nullptr && product.activation == Activation::kNone) {
    return;
  }
  finish(c, {rows, columns, ldc}, row_bias, column_bias, product.activation);
}

template void multiply_block(const OpenBlas&, const Product<float>&, std::int64_t, std::int64_t,
                             std::int64_t, std::int64_t);
template void multiply_block(const OpenBlas&, const Product<double>&, std::int64_t, std::int64_t,
                             std::int64_t, std::int64_t);

}  // namespace xpuruntime::cpu

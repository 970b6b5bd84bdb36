// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/open_blas.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

/// A matrix that a BLAS can read in place: rows `stride` elements apart and columns next to each
/// other, or the other way round when `transposed`.
struct MatrixLayout {
  bool transposed = false;
  std::int64_t stride = 1;
};

/// Empty when neither rows nor columns lie next to each other, they overlap, or a number does not
/// fit in 32 bits.
std::optional<MatrixLayout> matrix_layout(std::int64_t rows, std::int64_t columns,
                                          std::int64_t row_stride, std::int64_t column_stride);

/// c = a @ b, or c + a @ b, then activation(c + bias), for one block of it.
template <typename T>
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;  ///< [m, k]
  const T* b = nullptr;  ///< [k, n]
  T* c = nullptr;        ///< [m, n]
  MatrixLayout a_layout, b_layout, c_layout;
  const T* row_bias = nullptr;     ///< [m]; at most one of the two is given
  const T* column_bias = nullptr;  ///< [n]
  Activation activation = Activation::kNone;
  bool accumulate = false;  ///< add to what c holds
};

/// Computes rows [row, row + rows) and columns [column, column + columns) of the product, on the
/// calling thread. Unless it is added to, what c held before does not matter, even if it is NaN.
template <typename T>
void multiply_block(const OpenBlas& blas, const Product<T>& product, std::int64_t row,
                    std::int64_t rows, std::int64_t column, std::int64_t columns);

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

/// Rows of a norm, row by row from memory to memory. Strides are in elements; columns lie next to
/// each other.
struct NormRows {
  std::int64_t columns;
  bool centred;  ///< layer norm; else RMS norm
  float epsilon;
  const void* x;
  const void* residual;  ///< null without
  void* y;
  void* sum;    ///< null without
  float* mean;  ///< null without
  float* rstd;  ///< null without
  /// fp32, readable up to the next multiple of kMaxLanes.
  const float* weight;
  const float* bias;
  std::int64_t x_stride, residual_stride, y_stride, sum_stride, mean_stride, rstd_stride;
};

struct NormBackwardRows {
  std::int64_t columns;
  bool centred;
  const void* grad_y;
  const void* x;
  const float* weight;  ///< fp32, readable up to the next multiple of kMaxLanes
  const float* mean;    ///< null for an RMS norm
  const float* rstd;
  const void* grad_sum;  ///< null without
  void* grad_x;
  std::int64_t grad_y_stride, x_stride, grad_sum_stride, grad_x_stride, mean_stride, rstd_stride;
};

/// What follows a matrix product: out = activation(out + bias), in place.
struct FinishRows {
  float* data;
  std::int64_t rows, columns, stride;
  const float* row_bias;     ///< one for each row; null without
  const float* column_bias;  ///< one for each column; null without
  Activation activation;
};

inline constexpr std::int64_t kMaxLanes = 16;

/// `columns` rounded up to whole vectors.
constexpr std::int64_t padded(std::int64_t columns) noexcept {
  return (columns + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
}

/// The same functions, compiled for one instruction set. In each array: fp32, fp16, bf16.
struct VectorCode {
  const char* instructions;  ///< "avx512", "avx2", "baseline"
  /// Rows [first, last). `scratch` has padded(columns) elements.
  using Norm = void (*)(const NormRows&, std::int64_t first, std::int64_t last, float* scratch);
  /// `scratch` has 2 * padded(columns). `sums` has as many: the gradients of weight and bias
  /// summed over these rows are written there.
  using NormBackward = void (*)(const NormBackwardRows&, std::int64_t first, std::int64_t last,
                                float* scratch, float* sums);
  Norm norm[3];
  NormBackward norm_backward[3];
  void (*finish)(const FinishRows&);
};

/// Every set that was compiled, best first, whether or not this processor has it.
struct VectorCodes {
  const VectorCode* code[3];
  int count;
};
VectorCodes all_vector_code() noexcept;
/// Whether this processor can run it.
bool can_run(const VectorCode& code);
/// The best that this processor can run; asked once.
const VectorCode& vector_code();

}  // namespace xpuruntime::cpu

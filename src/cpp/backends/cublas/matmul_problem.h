// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

// No header of cuBLAS is used here, so that this can be tested on a machine without it.
namespace xpuruntime::cublas {

enum class Element : std::uint8_t { kFp64, kFp32, kFp16, kBf16, kFp8E4m3 };
std::size_t size_of(Element element) noexcept;

/// A matrix in memory as cuBLAS describes it, in columns: `columns` columns of `rows` elements that
/// lie next to each other, `leading` elements apart.
struct Matrix {
  Element element = Element::kFp32;
  bool transposed = false;  ///< it enters the product transposed
  std::int64_t rows = 0, columns = 0;
  std::int64_t leading = 0;
  std::int64_t batch_stride = 0;  ///< in elements; 0: one matrix for the whole batch
  std::uint32_t alignment = 1;    ///< bytes that divide the address, a power of two up to 256
};

/// out^T = b^T a^T, as cuBLAS counts in columns: `first` is b, `second` is a, and `out` has n rows
/// and m columns.
struct MatmulProblem {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrix first, second, out;
  bool tf32 = false;
  bool has_bias = false;
  Element bias = Element::kFp32;
  std::uint32_t bias_alignment = 1;
  bool scale_a = false, scale_b = false;
  Activation activation = Activation::kNone;

  /// No element to compute.
  bool empty() const noexcept { return m == 0 || n == 0 || batch == 0; }
  /// Where k is 0 nothing is read: both operands are this many bytes of zeros instead, and stand
  /// for a product with a small k. 0 otherwise.
  std::size_t zero_bytes = 0;
};

/// Fills `problem` with what the operation asks for, or says why no kernel of this backend can do
/// it: the element types, strides, sizes and alignment. Pure.
Support describe_matmul(const OpDesc& op, const DeviceInfo& device, MatmulProblem& problem);

/// What beyond that a kernel must refuse: cuBLASLt by its epilogues and the rules of fp8, cuBLAS
/// everything that is no plain product. Pure.
Support check_for_lt(const MatmulProblem& problem, const DeviceInfo& device);
Support check_for_gemm(const MatmulProblem& problem);

}  // namespace xpuruntime::cublas

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <optional>

#include "xpuruntime/op.h"
#include "xpuruntime/operand.h"

namespace xpuruntime {

struct MatmulInputs {
  Operand a;                 ///< [.., m, k]
  Operand b;                 ///< [.., k, n]
  Operand bias;              ///< [n]
  Operand scale_a, scale_b;  ///< fp32, one element; fp8 inputs only
};

struct MatmulOptions {
  Activation activation = Activation::kNone;
  bool allow_tf32 = false;
  bool deterministic = false;
  Phase phase = Phase::kInfer;
  /// Of the result; that of `a`, or bf16 for fp8 inputs, where it is not given.
  std::optional<DType> out_dtype;
};

/// Leading dimensions are batches and broadcast as in NumPy. They are joined: where `b` has none,
/// those of `a` become rows of one product. One output, `out`. Throws InputError naming the
/// argument.
OpCall make_matmul(const MatmulInputs& inputs, const MatmulOptions& options);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "xpuruntime/op.h"
#include "xpuruntime/operand.h"

namespace xpuruntime {

struct NormInputs {
  Operand x;         ///< [.., columns]
  Operand residual;  ///< as x
  Operand weight;    ///< [columns], in the dtype of x or fp32
  Operand bias;      ///< as weight; layer norm only
};

struct NormOptions {
  double epsilon = 1e-5;
  bool rms = false;
  bool want_sum = false;    ///< needs a residual
  bool want_stats = false;  ///< mean (layer norm only) and rstd, for the backward
  bool deterministic = false;
  Phase phase = Phase::kInfer;
};

/// Outputs: y, then sum, mean and rstd as far as they are wanted. Throws InputError naming the
/// argument.
OpCall make_norm(const NormInputs& inputs, const NormOptions& options);

struct NormBackwardInputs {
  Operand grad_y, x;   ///< x: what was normalized, with the residual added
  Operand weight;      ///< [columns]
  Operand mean, rstd;  ///< [..], as the forward gave them; mean: layer norm only
  Operand grad_sum;    ///< as x: gradient arriving at the sum
};

struct NormBackwardOptions {
  bool rms = false;
  bool want_weight = false;
  bool want_bias = false;  ///< layer norm only
  bool deterministic = false;
  /// Of grad_bias where there is no weight.
  DType bias_dtype{};
};

/// Outputs: grad_x, then grad_weight and grad_bias as far as they are wanted.
OpCall make_norm_backward(const NormBackwardInputs& inputs, const NormBackwardOptions& options);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/norm_op.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

constexpr DType kFloat32{2, 32, 1};
constexpr DType kFloat64{2, 64, 1};

DType stats_dtype(const Operand& x) noexcept { return x.dtype == kFloat64 ? kFloat64 : kFloat32; }

void check_x(const Operand& x) {
  require_present(x);
  if (x.rank < 1) require_rank(x, 1, "[.., columns]");
  if (!is_real(x.dtype)) {
    throw InputError(
        describe(x) +
        " has a dtype that is not normalized here. Fix: use float16, bfloat16, float32 or "
        "float64");
  }
  if (x.size(0) == 0) {
    throw InputError(describe(x) +
                     " has no columns to normalize over. Fix: pass rows that are not empty");
  }
}

void require_like(const Operand& x, const Operand& operand) {
  if (operand.absent) return;
  require_same_device(x, operand);
  require_same_dtype(x, operand);
  if (operand.rank != x.rank ||
      !std::equal(x.shape.begin(), x.shape.begin() + x.rank, operand.shape.begin())) {
    throw InputError(describe(operand) + " has another shape than " + describe(x) +
                     ". Fix: reshape it");
  }
}

void require_columns(const Operand& x, const Operand& operand) {
  if (operand.absent) return;
  require_same_device(x, operand);
  if (operand.dtype != x.dtype && operand.dtype != kFloat32) {
    throw InputError(describe(operand) + " must be float32 or " + to_string(x.dtype) +
                     ", the dtype of " + describe(x) + ". Fix: convert it");
  }
  if (operand.rank != 1 || operand.shape[0] != x.size(0)) {
    throw InputError(describe(operand) + " must be [" + std::to_string(x.size(0)) +
                     "], one for each column of " + describe(x) + ". Fix: reshape or cut it");
  }
}

void require_rows(const Operand& x, const Operand& operand) {
  if (operand.absent) return;
  require_same_device(x, operand);
  if (operand.dtype != stats_dtype(x) || operand.rank != x.rank - 1 ||
      !std::equal(operand.shape.begin(), operand.shape.begin() + operand.rank, x.shape.begin())) {
    throw InputError(describe(operand) + " must be " + to_string(stats_dtype(x)) +
                     " in the shape of " + describe(x) +
                     " without its last dimension. Fix: pass what the forward gave");
  }
}

// Rows and columns: [.., columns] → [rows, columns], [..] → [rows].
void set_rows(OpCall& call, std::size_t slot, const Operand& operand, std::size_t keep) {
  if (!operand.absent) call.set(slot, join_leading(operand, keep));
}

OutputSpec stats(const Operand& x, const char* name, std::uint8_t slot) {
  OutputSpec spec = output_like(x, name, slot);
  spec.dtype = stats_dtype(x);
  spec.rank = static_cast<std::uint8_t>(x.rank - 1);
  return spec;
}

OutputSpec columns(const Operand& x, DType dtype, const char* name, std::uint8_t slot) {
  OutputSpec spec;
  spec.name = name;
  spec.slot = slot;
  spec.dtype = dtype;
  spec.rank = 1;
  spec.shape[0] = x.size(0);
  return spec;
}

}  // namespace

OpCall make_norm(const NormInputs& inputs, const NormOptions& options) {
  using Slot = slots::Norm;
  const Operand& x = inputs.x;
  check_x(x);
  require_like(x, inputs.residual);
  require_columns(x, inputs.weight);
  require_columns(x, inputs.bias);
  if (!inputs.weight.absent) require_same_dtype(inputs.weight, inputs.bias);
  if (options.rms && !inputs.bias.absent) {
    throw InputError(describe(inputs.bias) +
                     " is given to rms_norm, which has no bias. Fix: leave it out");
  }
  if (options.want_sum && inputs.residual.absent) {
    throw InputError(
        "the sum is asked for without 'residual': it would be 'x' itself. Fix: leave it out");
  }
  const double epsilon = in_precision_of(x.dtype, options.epsilon);
  if (!(epsilon >= 0.0) || !std::isfinite(epsilon)) {
    throw InputError("eps is " + std::to_string(options.epsilon) +
                     "; expected a finite number that is not negative. Fix: give 1e-5");
  }
  OpCall call;
  call.begin(options.rms ? OpKind::kRmsNorm : OpKind::kLayerNorm, Slot::kCount, x.device);
  call.desc.phase = options.phase;
  call.desc.attributes.epsilon = epsilon;
  call.desc.attributes.deterministic = options.deterministic;
  set_rows(call, Slot::kX, x, 1);
  set_rows(call, Slot::kResidual, inputs.residual, 1);
  call.set(Slot::kWeight, inputs.weight);
  call.set(Slot::kBias, inputs.bias);
  call.add_output(output_like(x, "out", Slot::kY), 1, true);
  if (options.want_sum) call.add_output(output_like(x, "sum_out", Slot::kSum), 1, true);
  if (options.want_stats) {
    if (!options.rms) call.add_output(stats(x, "mean", Slot::kMean), 0, true);
    call.add_output(stats(x, "rstd", Slot::kRstd), 0, true);
  }
  return call;
}

OpCall make_norm_backward(const NormBackwardInputs& inputs, const NormBackwardOptions& options) {
  using Slot = slots::NormBackward;
  const Operand& x = inputs.x;
  check_x(x);
  require_present(inputs.grad_y);
  require_like(x, inputs.grad_y);
  require_like(x, inputs.grad_sum);
  require_columns(x, inputs.weight);
  require_present(inputs.rstd);
  require_rows(x, inputs.rstd);
  if (options.rms) {
    if (!inputs.mean.absent) {
      throw InputError(describe(inputs.mean) +
                       " is given to rms_norm, which has no mean. Fix: leave it out");
    }
    if (options.want_bias)
      throw InputError("grad_bias is asked of rms_norm, which has no bias. Fix: leave it out");
  } else {
    require_present(inputs.mean);
    require_rows(x, inputs.mean);
  }
  if (options.want_weight && inputs.weight.absent) {
    throw InputError("grad_weight is asked for without 'weight'. Fix: pass weight");
  }
  OpCall call;
  call.begin(options.rms ? OpKind::kRmsNormBackward : OpKind::kLayerNormBackward, Slot::kCount,
             x.device);
  call.desc.phase = Phase::kBackward;
  call.desc.attributes.deterministic = options.deterministic;
  set_rows(call, Slot::kGradY, inputs.grad_y, 1);
  set_rows(call, Slot::kX, x, 1);
  call.set(Slot::kWeight, inputs.weight);
  set_rows(call, Slot::kMean, inputs.mean, 0);
  set_rows(call, Slot::kRstd, inputs.rstd, 0);
  set_rows(call, Slot::kGradSum, inputs.grad_sum, 1);
  call.add_output(output_like(x, "grad_x", Slot::kGradX), 1, true);
  if (options.want_weight) {
    call.add_output(columns(x, inputs.weight.dtype, "grad_weight", Slot::kGradWeight), 1);
  }
  if (options.want_bias) {
    const DType dtype = inputs.weight.absent ? options.bias_dtype : inputs.weight.dtype;
    call.add_output(columns(x, dtype, "grad_bias", Slot::kGradBias), 1);
  }
  return call;
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/norm_operands.h"
#include "cpu/thread_pool.h"
#include "cpu/vectorised.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Norm;

class VectorisedNorm final : public Kernel {
 public:
  explicit VectorisedNorm(const OpDesc& op)
      : op_(op),
        run_(vector_code().norm[vector_index(*element_of(op[Slot::kX].dtype))]),
        workers_(thread_count()),
        rows_(op[Slot::kX].shape[0]),
        columns_(op[Slot::kX].shape[1]) {}

  std::size_t workspace_bytes() const noexcept override {
    return static_cast<std::size_t>((2 + workers_) * padded(columns_)) * sizeof(float);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    auto* const weight = static_cast<float*>(workspace);
    float* const bias = weight + padded(columns_);
    float* const scratch = bias + padded(columns_);
    spread_columns(view(op_, Slot::kWeight, operands), columns_, 1.0F, weight);
    spread_columns(view(op_, Slot::kBias, operands), columns_, 0.0F, bias);
    const auto stride = [&](std::size_t slot) { return op_[slot].strides[0]; };
    const NormRows at{.columns = columns_,
                      .centred = op_.kind == OpKind::kLayerNorm,
                      .epsilon = static_cast<float>(op_.attributes.epsilon),
                      .x = operands[Slot::kX],
                      .residual = operands[Slot::kResidual],
                      .y = operands[Slot::kY],
                      .sum = operands[Slot::kSum],
                      .mean = static_cast<float*>(operands[Slot::kMean]),
                      .rstd = static_cast<float*>(operands[Slot::kRstd]),
                      .weight = weight,
                      .bias = bias,
                      .x_stride = stride(Slot::kX),
                      .residual_stride = stride(Slot::kResidual),
                      .y_stride = stride(Slot::kY),
                      .sum_stride = stride(Slot::kSum),
                      .mean_stride = stride(Slot::kMean),
                      .rstd_stride = stride(Slot::kRstd)};
    const std::int64_t step = rows_at_once(columns_);
    parallel_for((rows_ + step - 1) / step, rows_ * columns_ / 4,
                 [&](std::int64_t task, int worker) {
                   run_(at, task * step, std::min(rows_, (task + 1) * step),
                        scratch + worker * padded(columns_));
                 });
  }

 private:
  const OpDesc op_;
  const VectorCode::Norm run_;
  const std::int64_t workers_;
  const std::int64_t rows_, columns_;
};

}  // namespace

Support vectorised_norm_supports(const OpDesc& op) {
  return check_norm_operands(op, Slot::kX, {Slot::kX, Slot::kResidual, Slot::kY, Slot::kSum});
}

std::unique_ptr<const Kernel> vectorised_norm(const OpDesc& op) {
  return std::make_unique<VectorisedNorm>(op);
}

}  // namespace xpuruntime::cpu

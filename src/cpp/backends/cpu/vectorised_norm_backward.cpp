// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/norm_operands.h"
#include "cpu/thread_pool.h"
#include "cpu/vectorised.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::NormBackward;

// Rows whose gradients of weight and bias are summed in fp32.
constexpr std::int64_t kRows = 64;
// Columns that are one task when these sums are added up.
constexpr std::int64_t kColumns = 64;

class VectorisedNormBackward final : public Kernel {
 public:
  explicit VectorisedNormBackward(const OpDesc& op)
      : op_(op),
        run_(vector_code().norm_backward[vector_index(*element_of(op[Slot::kX].dtype))]),
        workers_(thread_count()),
        rows_(op[Slot::kX].shape[0]),
        columns_(op[Slot::kX].shape[1]),
        length_(padded(columns_)),
        tasks_((rows_ + kRows - 1) / kRows) {}

  std::size_t workspace_bytes() const noexcept override {
    return static_cast<std::size_t>((1 + 2 * workers_ + 2 * tasks_) * length_) * sizeof(float);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    auto* const weight = static_cast<float*>(workspace);
    float* const scratch = weight + length_;
    float* const sums = scratch + workers_ * 2 * length_;
    spread_columns(view(op_, Slot::kWeight, operands), columns_, 1.0F, weight);
    const auto stride = [&](std::size_t slot) { return op_[slot].strides[0]; };
    const NormBackwardRows at{.columns = columns_,
                              .centred = op_.kind == OpKind::kLayerNormBackward,
                              .grad_y = operands[Slot::kGradY],
                              .x = operands[Slot::kX],
                              .weight = weight,
                              .mean = static_cast<const float*>(operands[Slot::kMean]),
                              .rstd = static_cast<const float*>(operands[Slot::kRstd]),
                              .grad_sum = operands[Slot::kGradSum],
                              .grad_x = operands[Slot::kGradX],
                              .grad_y_stride = stride(Slot::kGradY),
                              .x_stride = stride(Slot::kX),
                              .grad_sum_stride = stride(Slot::kGradSum),
                              .grad_x_stride = stride(Slot::kGradX),
                              .mean_stride = stride(Slot::kMean),
                              .rstd_stride = stride(Slot::kRstd)};
    parallel_for(tasks_, rows_ * columns_ / 4, [&](std::int64_t task, int worker) {
      run_(at, task * kRows, std::min(rows_, (task + 1) * kRows), scratch + worker * 2 * length_,
           sums + task * 2 * length_);
    });
    add_up(view(op_, Slot::kGradWeight, operands), sums);
    add_up(view(op_, Slot::kGradBias, operands), sums + length_);
  }

 private:
  void add_up(const View& out, const float* sums) const noexcept {
    if (!out) return;
    const std::int64_t blocks = (columns_ + kColumns - 1) / kColumns;
    parallel_for(blocks, tasks_ * columns_, [&](std::int64_t block, int) {
      const std::int64_t first = block * kColumns;
      const std::int64_t count = std::min(kColumns, columns_ - first);
      double totals[kColumns] = {};
      for (std::int64_t task = 0; task < tasks_; ++task) {
        const float* const part = sums + task * 2 * length_ + first;
        for (std::int64_t j = 0; j < count; ++j) totals[j] += static_cast<double>(part[j]);
      }
      for (std::int64_t j = 0; j < count; ++j) out.set(first + j, totals[j]);
    });
  }

  const OpDesc op_;
  const VectorCode::NormBackward run_;
  const std::int64_t workers_;
  const std::int64_t rows_, columns_, length_, tasks_;
};

}  // namespace

Support vectorised_norm_backward_supports(const OpDesc& op) {
  return check_norm_operands(op, Slot::kX, {Slot::kGradY, Slot::kX, Slot::kGradSum, Slot::kGradX});
}

std::unique_ptr<const Kernel> vectorised_norm_backward(const OpDesc& op) {
  return std::make_unique<VectorisedNormBackward>(op);
}

}  // namespace xpuruntime::cpu

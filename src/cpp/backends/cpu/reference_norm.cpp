// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cmath>

#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Norm;

class ReferenceNorm final : public Kernel {
 public:
  explicit ReferenceNorm(const OpDesc& op)
      : op_(op), workers_(thread_count()), columns_(op[Slot::kX].shape[1]) {}

  std::size_t workspace_bytes() const noexcept override {
    return static_cast<std::size_t>(workers_ * columns_) * sizeof(double);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View x = view(op_, Slot::kX, operands);
    const View residual = view(op_, Slot::kResidual, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View bias = view(op_, Slot::kBias, operands);
    const View y = view(op_, Slot::kY, operands);
    const View sum = view(op_, Slot::kSum, operands);
    const View mean = view(op_, Slot::kMean, operands);
    const View rstd = view(op_, Slot::kRstd, operands);
    const bool centred = op_.kind == OpKind::kLayerNorm;
    const auto count = static_cast<double>(columns_);
    const std::int64_t rows = x.shape[2];
    parallel_for(rows, rows * columns_, [&](std::int64_t row, int worker) {
      double* const s = static_cast<double*>(workspace) + worker * columns_;
      double total = 0;
      for (std::int64_t j = 0; j < columns_; ++j) {
        s[j] = x.get(row, j) + (residual ? residual.get(row, j) : 0.0);
        total += s[j];
      }
      double middle = centred ? total / count : 0.0;
      // The mean of what is left corrects the rounding of a long sum.
      double rest = 0;
      for (std::int64_t j = 0; j < columns_; ++j) rest += s[j] - middle;
      if (centred) middle += rest / count;
      double squares = 0;
      for (std::int64_t j = 0; j < columns_; ++j) squares += (s[j] - middle) * (s[j] - middle);
      const double factor = 1.0 / std::sqrt(squares / count + op_.attributes.epsilon);
      for (std::int64_t j = 0; j < columns_; ++j) {
        if (sum) sum.set(row, j, s[j]);
        y.set(
            row, j,
            (s[j] - middle) * factor * (weight ? weight.get(j) : 1.0) + (bias ? bias.get(j) : 0.0));
      }
      if (mean) mean.set(row, middle);
      if (rstd) rstd.set(row, factor);
    });
  }

 private:
  const OpDesc op_;
  const std::int64_t workers_;
  const std::int64_t columns_;
};

}  // namespace

std::unique_ptr<const Kernel> reference_norm(const OpDesc& op) {
  return std::make_unique<ReferenceNorm>(op);
}

}  // namespace xpuruntime::cpu

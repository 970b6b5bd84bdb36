// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::NormBackward;

class ReferenceNormBackward final : public Kernel {
 public:
  explicit ReferenceNormBackward(const OpDesc& op)
      : op_(op), workers_(thread_count()), columns_(op[Slot::kX].shape[1]) {}

  std::size_t workspace_bytes() const noexcept override {
    return static_cast<std::size_t>(workers_ * 2 * columns_) * sizeof(double);
  }

  // With xhat = (x - mean) * rstd and g = grad_y * weight: grad_x = rstd * (g - mean(g) - xhat *
  // mean(g * xhat)) + grad_sum, without mean(g) for an RMS norm.
  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View grad_y = view(op_, Slot::kGradY, operands);
    const View x = view(op_, Slot::kX, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View mean = view(op_, Slot::kMean, operands);
    const View rstd = view(op_, Slot::kRstd, operands);
    const View grad_sum = view(op_, Slot::kGradSum, operands);
    const View grad_x = view(op_, Slot::kGradX, operands);
    const std::int64_t rows = x.shape[2];
    const auto xhat = [&](std::int64_t row, std::int64_t j) {
      return (x.get(row, j) - (mean ? mean.get(row) : 0.0)) * rstd.get(row);
    };
    // First, because grad_x may be written over grad_y or x.
    add_columns(operands, grad_y, xhat);
    parallel_for(rows, rows * columns_, [&](std::int64_t row, int worker) {
      double* const g = static_cast<double*>(workspace) + worker * 2 * columns_;
      double* const normal = g + columns_;
      double mean_g = 0;
      double mean_gx = 0;
      for (std::int64_t j = 0; j < columns_; ++j) {
        g[j] = grad_y.get(row, j) * (weight ? weight.get(j) : 1.0);
        normal[j] = xhat(row, j);
        mean_g += g[j];
        mean_gx += g[j] * normal[j];
      }
      mean_g = mean ? mean_g / static_cast<double>(columns_) : 0.0;
      mean_gx /= static_cast<double>(columns_);
      const double factor = rstd.get(row);
      for (std::int64_t j = 0; j < columns_; ++j) {
        const double more = grad_sum ? grad_sum.get(row, j) : 0.0;
        grad_x.set(row, j, factor * (g[j] - mean_g - normal[j] * mean_gx) + more);
      }
    });
  }

 private:
  template <typename Xhat>
  void add_columns(void* const* operands, const View& grad_y, const Xhat& xhat) const noexcept {
    const View grad_weight = view(op_, Slot::kGradWeight, operands);
    const View grad_bias = view(op_, Slot::kGradBias, operands);
    if (!grad_weight && !grad_bias) return;
    const std::int64_t rows = grad_y.shape[2];
    parallel_for(columns_, rows * columns_, [&](std::int64_t j, int) {
      double of_weight = 0;
      double of_bias = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        const double gradient = grad_y.get(row, j);
        of_bias += gradient;
        if (grad_weight) of_weight += gradient * xhat(row, j);
      }
      if (grad_weight) grad_weight.set(j, of_weight);
      if (grad_bias) grad_bias.set(j, of_bias);
    });
  }

  const OpDesc op_;
  const std::int64_t workers_;
  const std::int64_t columns_;
};

}  // namespace

std::unique_ptr<const Kernel> reference_norm_backward(const OpDesc& op) {
  return std::make_unique<ReferenceNormBackward>(op);
}

}  // namespace xpuruntime::cpu

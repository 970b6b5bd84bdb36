// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/activation.h"
#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Matmul;

// Rows of the result that are computed together, so that a row of b is converted once for all.
constexpr std::int64_t kRows = 8;

class ReferenceMatmul final : public Kernel {
 public:
  explicit ReferenceMatmul(const OpDesc& op) : op_(op), workers_(thread_count()) {}

  std::size_t workspace_bytes() const noexcept override {
    const View out = view(op_, Slot::kOut, nullptr);
    return static_cast<std::size_t>(workers_ * (kRows + 1) * out.shape[3]) * sizeof(double);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View a = view(op_, Slot::kA, operands);
    const View b = view(op_, Slot::kB, operands);
    const View out = view(op_, Slot::kOut, operands);
    const View bias = view(op_, Slot::kBias, operands);
    const View scale_a = view(op_, Slot::kScaleA, operands);
    const View scale_b = view(op_, Slot::kScaleB, operands);
    const double scale = (scale_a ? scale_a.get(0) : 1.0) * (scale_b ? scale_b.get(0) : 1.0);
    const std::int64_t m = out.shape[2];
    const std::int64_t n = out.shape[3];
    const std::int64_t k = a.shape[3];
    const std::int64_t blocks = (m + kRows - 1) / kRows;
    parallel_for(out.shape[1] * blocks, out.shape[1] * m * n * k,
                 [&](std::int64_t task, int worker) {
                   const std::int64_t batch = task / blocks;
                   const std::int64_t first = task % blocks * kRows;
                   const std::int64_t rows = std::min(kRows, m - first);
                   double* const row_b = static_cast<double*>(workspace) + worker * (kRows + 1) * n;
                   double* const sums = row_b + n;
                   std::fill(sums, sums + rows * n, 0.0);
                   for (std::int64_t p = 0; p < k; ++p) {
                     b.get_row(0, batch, p, row_b);
                     for (std::int64_t i = 0; i < rows; ++i) {
                       const double factor = a.get(0, batch, first + i, p);
                       for (std::int64_t j = 0; j < n; ++j) sums[i * n + j] += factor * row_b[j];
                     }
                   }
                   for (std::int64_t i = 0; i < rows; ++i) {
                     for (std::int64_t j = 0; j < n; ++j) {
                       const double value = scale * sums[i * n + j] + (bias ? bias.get(j) : 0.0);
                       out.set(0, batch, first + i, j, activate(op_.attributes.activation, value));
                     }
                   }
                 });
  }

 private:
  const OpDesc op_;
  const std::int64_t workers_;
};

}  // namespace

std::unique_ptr<const Kernel> reference_matmul(const OpDesc& op) {
  return std::make_unique<ReferenceMatmul>(op);
}

}  // namespace xpuruntime::cpu

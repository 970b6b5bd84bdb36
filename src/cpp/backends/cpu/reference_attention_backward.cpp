// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/reference.h"
#include "cpu/reference_attention_kernel.h"
#include "cpu/thread_pool.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::AttentionBackward;

class ReferenceAttentionBackward final : public ReferenceAttentionKernel<Slot> {
 public:
  explicit ReferenceAttentionBackward(const OpDesc& op) : ReferenceAttentionKernel(op) {}

  // With weights p, dropped weights p' = p * f and g = grad_out: grad_v = p'^T g; the gradient of p
  // is t = f * (g v^T); of the scores s = p * (t - sum(p * t)); grad_q = scale s k, grad_k = scale
  // s^T q.
  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const AttentionRows rows = rows_of(operands);
    const View grad_k = view(op_, Slot::kGradK, operands);
    const View grad_v = view(op_, Slot::kGradV, operands);
    const std::int64_t kv_heads = rows.k.shape[1];
    const std::int64_t tasks = rows.batch() * kv_heads;
    const std::int64_t steps =
        rows.batch() * rows.heads() * rows.q_length() * kv_length_ * head_dim_;
    // A task is one head of k and v, with every query head that reads it.
    parallel_for(tasks, steps, [&](std::int64_t task, int worker) {
      const std::int64_t b = task / kv_heads;
      const std::int64_t kv_head = task % kv_heads;
      double* const sums_k = place_of(worker, workspace);
      double* const sums_v = sums_k + kv_length_ * head_dim_;
      std::fill(sums_k, sums_v + kv_length_ * head_dim_, 0.0);
      for (std::int64_t i = 0; i < rows.group(); ++i) {
        add_head(rows, operands, b, kv_head * rows.group() + i, sums_k, sums_v);
      }
      for (std::int64_t j = 0; j < kv_length_; ++j) {
        grad_k.set_row(b, kv_head, j, sums_k + j * head_dim_);
        grad_v.set_row(b, kv_head, j, sums_v + j * head_dim_);
      }
    });
  }

 private:
  void add_head(const AttentionRows& rows, void* const* operands, std::int64_t b, std::int64_t h,
                double* sums_k, double* sums_v) const noexcept {
    const View grad_out = view(op_, Slot::kGradOut, operands);
    const View grad_q = view(op_, Slot::kGradQ, operands);
    const std::int64_t kv_head = h / rows.group();
    double* const weights = sums_v + kv_length_ * head_dim_;
    double* const slopes = weights + kv_length_;
    double* const query = slopes + kv_length_;
    double* const gradient = query + head_dim_;
    double* const scratch = gradient + head_dim_;
    double* const sums_q = scratch + head_dim_;
    for (std::int64_t row = 0; row < rows.q_length(); ++row) {
      rows.q.get_row(b, h, row, query);
      grad_out.get_row(b, h, row, gradient);
      rows.softmax_weights(b, h, row, query, weights, scratch);
      const std::int64_t seen = rows.visible(row);
      double mean = 0;
      for (std::int64_t j = 0; j < seen; ++j) {
        slopes[j] = 0;
        if (weights[j] == 0.0) continue;
        const double factor = rows.dropout.factor(b * rows.heads() + h, row, j);
        rows.v.get_row(b, kv_head, j, scratch);
        for (std::int64_t d = 0; d < head_dim_; ++d) {
          slopes[j] += gradient[d] * scratch[d];
          sums_v[j * head_dim_ + d] += weights[j] * factor * gradient[d];
        }
        slopes[j] *= factor;
        mean += weights[j] * slopes[j];
      }
      std::fill(sums_q, sums_q + head_dim_, 0.0);
      for (std::int64_t j = 0; j < seen; ++j) {
        if (weights[j] == 0.0) continue;
        const double slope = rows.scale * weights[j] * (slopes[j] - mean);
        rows.k.get_row(b, kv_head, j, scratch);
        for (std::int64_t d = 0; d < head_dim_; ++d) {
          sums_q[d] += slope * scratch[d];
          sums_k[j * head_dim_ + d] += slope * query[d];
        }
      }
      grad_q.set_row(b, h, row, sums_q);
    }
  }

  std::int64_t per_worker() const noexcept override {
    return 2 * kv_length_ * head_dim_ + 2 * kv_length_ + 4 * head_dim_;
  }
};

}  // namespace

std::unique_ptr<const Kernel> reference_attention_backward(const OpDesc& op) {
  return std::make_unique<ReferenceAttentionBackward>(op);
}

}  // namespace xpuruntime::cpu

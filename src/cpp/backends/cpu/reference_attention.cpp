// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/reference.h"
#include "cpu/reference_attention_kernel.h"
#include "cpu/thread_pool.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Attention;

class ReferenceAttention final : public ReferenceAttentionKernel<Slot> {
 public:
  explicit ReferenceAttention(const OpDesc& op) : ReferenceAttentionKernel(op) {}

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const AttentionRows rows = rows_of(operands);
    const View out = view(op_, Slot::kOut, operands);
    const View lse = view(op_, Slot::kLse, operands);
    const std::int64_t length = rows.q_length();
    const std::int64_t tasks = rows.batch() * rows.heads() * length;
    parallel_for(tasks, tasks * kv_length_ * head_dim_, [&](std::int64_t task, int worker) {
      const std::int64_t row = task % length;
      const std::int64_t head = task / length;  // batch * heads + h
      const std::int64_t b = head / rows.heads();
      const std::int64_t h = head % rows.heads();
      double* const weights = place_of(worker, workspace);
      double* const query = weights + kv_length_;
      double* const scratch = query + head_dim_;
      double* const sums = scratch + head_dim_;
      rows.q.get_row(b, h, row, query);
      const double log_sum = rows.softmax_weights(b, h, row, query, weights, scratch);
      // [batch, heads, q_length] is seen with a 1 in front.
      if (lse) lse.set(0, b, h, row, log_sum);
      std::fill(sums, sums + head_dim_, 0.0);
      for (std::int64_t j = 0; j < rows.visible(row); ++j) {
        const double weight = weights[j] * rows.dropout.factor(head, row, j);
        if (weight == 0.0) continue;
        rows.v.get_row(b, h / rows.group(), j, scratch);
        for (std::int64_t d = 0; d < head_dim_; ++d) sums[d] += weight * scratch[d];
      }
      out.set_row(b, h, row, sums);
    });
  }

 private:
  std::int64_t per_worker() const noexcept override { return kv_length_ + 3 * head_dim_; }
};

}  // namespace

std::unique_ptr<const Kernel> reference_attention(const OpDesc& op) {
  return std::make_unique<ReferenceAttention>(op);
}

}  // namespace xpuruntime::cpu

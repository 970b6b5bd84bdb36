// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cpu/attention_rows.h"
#include "cpu/thread_pool.h"
#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

/// What the reference of attention and that of its gradient have in common: the operation, and
/// doubles for each worker to count with. `Slot` is that operation of xpuruntime::slots.
template <typename Slot>
class ReferenceAttentionKernel : public Kernel {
 public:
  std::size_t workspace_bytes() const noexcept final {
    return static_cast<std::size_t>(workers_ * per_worker()) * sizeof(double);
  }

 protected:
  explicit ReferenceAttentionKernel(const OpDesc& op)
      : op_(op),
        kv_length_(op[Slot::kK].shape[2]),
        head_dim_(op[Slot::kQ].shape[3]),
        workers_(thread_count()) {}

  AttentionRows rows_of(void* const* operands) const {
    return attention_rows(op_, operands, Slot::kQ, Slot::kK, Slot::kV, Slot::kMask, Slot::kRng);
  }
  double* place_of(int worker, void* workspace) const noexcept {
    return static_cast<double*>(workspace) + worker * per_worker();
  }

  const OpDesc op_;
  const std::int64_t kv_length_, head_dim_;

 private:
  /// How many doubles.
  virtual std::int64_t per_worker() const noexcept = 0;

  const std::int64_t workers_;
};

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "xpuruntime/buffer.h"
#include "xpuruntime/op.h"
#include "xpuruntime/stream.h"

namespace xpuruntime {

class MemoryPool;

/// Where the operands of one operation lie in a block that begins at a multiple of 256.
struct OperandPlan {
  explicit OperandPlan(const OpDesc& op);
  /// Of the first byte of an operand, and of its element (0, ..., 0): the two differ where a stride
  /// is negative.
  std::array<std::size_t, kMaxSlots> first{}, origin{}, bytes{};
  std::size_t total = 0;  ///< a multiple of 256
};

/// Operands for measuring, several sets of them, and scratch memory.
class TunerOperands {
 public:
  using Addresses = std::array<void*, kMaxSlots>;

  /// From the pool, in the order of `stream`. Throws OutOfMemoryError.
  TunerOperands(const OpDesc& op, const OperandPlan& plan, std::size_t sets,
                std::size_t workspace_bytes, MemoryPool& pool, const Stream& stream);

  std::size_t sets() const noexcept { return addresses_.size(); }
  void* const* set(std::size_t index) const noexcept {
    return addresses_[index % addresses_.size()].data();
  }
  void* workspace() const noexcept { return workspace_ ? workspace_.data() : nullptr; }

 private:
  void fill(const OpDesc& op, const OperandPlan& plan, const Stream& stream);

  Buffer operands_, workspace_;
  std::vector<Addresses> addresses_;
};

}  // namespace xpuruntime

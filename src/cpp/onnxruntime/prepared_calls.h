// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "operation.h"

namespace xpuruntime::ort {

/// Inputs as they decide how a call is described.
struct InputKey {
  DType dtype{};
  std::uint8_t present = 0;
  std::uint8_t rank = 0;
  std::uint8_t alignment = 0;  ///< as in TensorDesc
  std::array<std::int64_t, Operand::kMaxRank> shape{};

  friend bool operator==(const InputKey& left, const InputKey& right) noexcept;
};
using InputKeys = std::array<InputKey, OpSpec::kMaxInputs>;

/// A described call that can be made again with other addresses.
struct PreparedCall {
  InputKeys inputs;
  std::size_t hash = 0;
  OpDesc desc;
  std::uint8_t out_slot = 0;
  bool empty = false;
  std::array<std::int64_t, Operand::kMaxRank> shape{};
  std::size_t rank = 0;
};

/// Described calls of one node, by their inputs. Read without a lock and never shrinking: a call
/// that finds no place is described anew each time, which takes one or two microseconds.
/// Thread-safe.
class PreparedCalls {
 public:
  static constexpr std::size_t kMost = 64;

  PreparedCalls() = default;
  ~PreparedCalls();
  PreparedCalls(const PreparedCalls&) = delete;
  PreparedCalls& operator=(const PreparedCalls&) = delete;

  static std::size_t hash(const InputKeys& inputs, std::size_t count) noexcept;
  /// Null where there is none.
  const PreparedCall* find(const InputKeys& inputs, std::size_t count,
                           std::size_t hash) const noexcept;
  void keep(std::unique_ptr<const PreparedCall> call) noexcept;

 private:
  static constexpr std::size_t kProbes = 8;
  std::array<std::atomic<const PreparedCall*>, kMost> slots_{};
};

}  // namespace xpuruntime::ort

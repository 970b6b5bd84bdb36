// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// A number that no gate has had before.
std::uint64_t next_gate_number() noexcept;

/// What tells the calls of one kind of a gate from others: words, for a CallTable. Of tensors as
/// fine as call_key.
class CallFacts {
 public:
  explicit CallFacts(std::uint64_t first) noexcept { words_[0] = first; }

  /// Adds a tensor: shape, strides, type, device, alignment. False where PyTorch does not say them,
  /// or there are too many facts. Needs no GIL.
  bool add(const TorchShim& torch, TorchTensor tensor) noexcept;
  /// Adds a number, such as one that says that a tensor is not given. False as above.
  bool add(std::uint64_t word) noexcept;

  std::span<const std::uint64_t> words() const noexcept { return {words_.data(), size_}; }

 private:
  static constexpr std::size_t kMostWords = 96;

  std::array<std::uint64_t, kMostWords> words_;
  std::size_t size_ = 1;
};

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_facts.h"

#include <atomic>

#include "tensor_layout.h"

namespace xpuruntime::bindings {

std::uint64_t next_gate_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

bool CallFacts::add(const TorchShim& torch, TorchTensor tensor) noexcept {
  TensorTraits traits;
  if (!read_traits(torch, tensor, traits)) return false;
  const auto rank = static_cast<std::size_t>(traits.rank);
  if (rank > kMostWords || size_ + 1 + 2 * rank > kMostWords) return false;
  const auto byte = [](auto value) { return static_cast<std::uint64_t>(value) & 0xFFU; };
  words_[size_++] = byte(rank) | byte(traits.device) << 8U | byte(traits.index) << 16U |
                    byte(traits.alignment) << 24U |
                    static_cast<std::uint64_t>(static_cast<std::uint32_t>(traits.dtype)) << 32U;
  for (const std::int64_t* values : {traits.sizes, traits.strides}) {
    for (std::size_t i = 0; i < rank; ++i) {
      words_[size_++] = static_cast<std::uint64_t>(values[i]);
    }
  }
  return true;
}

bool CallFacts::add(std::uint64_t word) noexcept {
  if (size_ >= kMostWords) return false;
  words_[size_++] = word;
  return true;
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_facts.h"

#include <atomic>

namespace xpuruntime::bindings {
namespace {

constexpr std::uintptr_t kAlignment = 16;

}  // namespace

std::uint64_t next_gate_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

bool CallFacts::add(const TorchShim& torch, TorchTensor tensor) noexcept {
  std::int64_t dim = 0;
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  std::int32_t dtype = 0;
  std::int32_t device = 0;
  std::int32_t index = 0;
  const void* data = nullptr;
  if (torch.dim(tensor, &dim) != 0 || torch.sizes(tensor, &sizes) != 0 ||
      torch.strides(tensor, &strides) != 0 || torch.dtype(tensor, &dtype) != 0 ||
      torch.device_type(tensor, &device) != 0 || torch.device_index(tensor, &index) != 0 ||
      torch.data(tensor, &data) != 0) {
    return false;
  }
  const auto rank = static_cast<std::size_t>(dim);
  if (rank > kMostWords || size_ + 1 + 2 * rank > kMostWords) return false;
  const auto byte = [](auto value) { return static_cast<std::uint64_t>(value) & 0xFFU; };
  words_[size_++] = byte(rank) | byte(device) << 8U | byte(index) << 16U |
                    byte(reinterpret_cast<std::uintptr_t>(data) & (kAlignment - 1)) << 24U |
                    static_cast<std::uint64_t>(static_cast<std::uint32_t>(dtype)) << 32U;
  for (const std::int64_t* values : {sizes, strides}) {
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

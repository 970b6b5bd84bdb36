// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "prepared_calls.h"

#include <algorithm>

namespace xpuruntime::ort {

bool operator==(const InputKey& left, const InputKey& right) noexcept {
  return left.present == right.present && left.dtype == right.dtype && left.rank == right.rank &&
         left.alignment == right.alignment &&
         std::equal(left.shape.begin(), left.shape.begin() + left.rank, right.shape.begin());
}

PreparedCalls::~PreparedCalls() {
  for (const auto& slot : slots_) delete slot.load();
}

std::size_t PreparedCalls::hash(const InputKeys& inputs, std::size_t count) noexcept {
  std::uint64_t value = 0x9e3779b97f4a7c15U;
  const auto mix = [&](std::uint64_t word) {
    value = (value ^ word) * 0xff51afd7ed558ccdU;
    value ^= value >> 29U;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const InputKey& input = inputs[i];
    mix(std::uint64_t{input.present} | std::uint64_t{input.rank} << 8U |
        std::uint64_t{input.alignment} << 16U | std::uint64_t{input.dtype.code} << 24U |
        std::uint64_t{input.dtype.bits} << 32U);
    for (std::size_t d = 0; d < input.rank; ++d) mix(static_cast<std::uint64_t>(input.shape[d]));
  }
  return static_cast<std::size_t>(value);
}

const PreparedCall* PreparedCalls::find(const InputKeys& inputs, std::size_t count,
                                        std::size_t hash) const noexcept {
  for (std::size_t probe = 0; probe < kProbes; ++probe) {
    const PreparedCall* const call = slots_[(hash + probe) % kMost].load(std::memory_order_acquire);
    if (call == nullptr) return nullptr;
    if (call->hash != hash) continue;
    const auto end = inputs.begin() + static_cast<std::ptrdiff_t>(count);
    if (std::equal(inputs.begin(), end, call->inputs.begin())) return call;
  }
  return nullptr;
}

void PreparedCalls::keep(std::unique_ptr<const PreparedCall> call) noexcept {
  for (std::size_t probe = 0; probe < kProbes; ++probe) {
    const PreparedCall* expected = nullptr;
    if (slots_[(call->hash + probe) % kMost].compare_exchange_strong(expected, call.get())) {
      (void)call.release();
      return;
    }
    if (expected->hash == call->hash && expected->inputs == call->inputs) return;
  }
}

}  // namespace xpuruntime::ort

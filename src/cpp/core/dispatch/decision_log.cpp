// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/decision_log.h"

namespace xpuruntime {

std::vector<std::shared_ptr<const Decision>> DecisionLog::decisions() const {
  const std::lock_guard lock(mutex_);
  return decisions_;
}

std::vector<std::uint64_t> DecisionLog::counts() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> counts;
  counts.reserve(decisions_.size());
  for (const auto& one : decisions_) counts.push_back(one->count.load(std::memory_order_relaxed));
  return counts;
}

std::uint64_t DecisionLog::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

void DecisionLog::clear() {
  std::vector<std::shared_ptr<const Decision>> cleared;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  cleared.swap(decisions_);
  dropped_ = 0;
  epoch_.fetch_add(1, std::memory_order_relaxed);
}

void DecisionLog::record(const std::shared_ptr<const Decision>& decision) {
  const std::lock_guard lock(mutex_);
  if (decisions_.size() < kMost) {
    decisions_.push_back(decision);
  } else {
    ++dropped_;
  }
}

}  // namespace xpuruntime

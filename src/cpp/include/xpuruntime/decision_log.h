// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "xpuruntime/decision.h"

namespace xpuruntime {

/// Distinct decisions that served calls or were asked for, since it was made or cleared. The
/// Dispatcher owns that of the process; rules may name another one, so that what is decided under
/// them, as in an instrumented pass, stands there alone. Thread-safe.
class DecisionLog {
 public:
  /// Decisions that are recorded at most.
  static constexpr std::size_t kMost = 10'000;

  /// Oldest first. At most kMost are kept: later ones are served and not recorded, and `dropped`
  /// counts them.
  std::vector<std::shared_ptr<const Decision>> decisions() const;
  /// How many calls each of them has served.
  std::vector<std::uint64_t> counts() const;
  std::uint64_t dropped() const;
  /// Forgets them; those that go on serving calls are recorded again, with a count from 0.
  void clear();

 private:
  friend class CallSite;
  void record(const std::shared_ptr<const Decision>& decision);
  std::uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Decision>> decisions_;
  std::uint64_t dropped_ = 0;
  std::atomic<std::uint64_t> epoch_{1};  // grows when it is cleared
};

}  // namespace xpuruntime

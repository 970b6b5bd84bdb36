// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace xpuruntime {

/// One kernel that was measured.
struct TunedTime {
  std::string kernel;
  std::string config;
  double microseconds = 0;
  /// With the control: the ratio of their times, the ends of its interval, and "faster", "slower",
  /// "tied" or "inconclusive". "control" for that one itself.
  double ratio = 1, low = 1, high = 1;
  std::string verdict = {};  // NOLINT(readability-redundant-member-init): lists may end before it
};

/// The outcome of measuring one operation on one device.
struct TunedEntry {
  std::vector<TunedTime> times;  ///< the chosen one first
  /// What the entry holds for: name → version, such as "device" → "NVIDIA H200 sm90", "driver" →
  /// "13.0", "cublas" → "cublasLt 13.0.2". It is stale when any of them differs.
  std::map<std::string, std::string> validators;
  std::size_t rounds = 0;  ///< that were run
  double seconds = 0;      ///< of the budget that they were given
  /// Nothing is known to be faster than the control, and not of all that they are not: worth
  /// measuring again with a larger budget.
  bool undecided = false;
};

/// Keeps what was measured, between processes too. Implementations are thread-safe.
class TuningStore {
 public:
  virtual ~TuningStore() = default;
  /// The entry of a key (`to_key` of the operation and the device's name) if it holds for these
  /// validators. Otherwise nothing, and where one was dropped (stale, damaged) `note` says which
  /// and why. Never throws.
  virtual std::optional<TunedEntry> find(const std::string& key,
                                         const std::map<std::string, std::string>& validators,
                                         std::string& note) noexcept = 0;
  /// Never throws: where it cannot be kept, `note` says why.
  virtual void put(const std::string& key, const TunedEntry& entry, std::string& note) noexcept = 0;
};

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

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
};

/// The outcome of measuring one operation on one device.
struct TunedEntry {
  std::vector<TunedTime> times;  ///< fastest first
  /// What the entry holds for: name → version, such as "device" → "NVIDIA H200 sm90", "driver" →
  /// "13.0", "cublas" → "cublasLt 13.0.2". It is stale when any of them differs.
  std::map<std::string, std::string> validators;
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

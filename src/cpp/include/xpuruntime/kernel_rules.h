// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/op.h"
#include "xpuruntime/tuning_rule.h"

namespace xpuruntime {

class DecisionLog;

/// Both ends in.
struct IntRange {
  std::int64_t first = 0;
  std::int64_t last = std::numeric_limits<std::int64_t>::max();
  bool contains(std::int64_t value) const noexcept { return first <= value && value <= last; }
};

/// The calls that a rule is for, of one place: the rule engine of the Python policies compares the
/// names of nodes and modules, and hands over the rules that may match there. What is not stated
/// holds always; a fact that the operation has not never meets a stated key. The same meaning as
/// RuleMatch of the Python policies.
struct KernelMatch {
  std::string op;  ///< a policy key; empty: any
  std::optional<IntRange> m, n, k, head_dim, kv;
  std::vector<std::string> dtypes;
  std::string device;  ///< "cuda", "cuda:1", "sm90"; "auto" and empty: any
  std::vector<std::string> phases;

  bool matches(const OpDesc& desc, const DeviceInfo& info) const;
};

struct KernelRule {
  KernelMatch match;
  /// In order of preference. "auto": any. An id may carry "@config", what a Kernel called its
  /// config, to replay exactly that.
  std::vector<std::string> use;
  std::string source;  ///< "kernels.rules[0]", "kernels.matmul": what a Decision names
};

/// How strictly a policy is held; see the policy's `mode`.
enum class Enforcement : std::uint8_t { kPrefer, kStrict };
enum class AutoStrategy : std::uint8_t { kFirstSupported, kBestPerformance };

/// What a policy asks for one operation.
struct Preference {
  std::vector<std::string> use;  ///< never empty; {"auto"} where nothing is asked
  std::string source;            ///< "default" where nothing is asked
  bool from_rule = false;
};

/// The rules of a KernelPolicy for one place, compiled once. Immutable.
struct KernelRules {
  std::vector<KernelRule> rules;     ///< the first that matches wins
  std::vector<KernelRule> defaults;  ///< the short forms; `match` has the op only
  Enforcement enforcement = Enforcement::kPrefer;
  AutoStrategy strategy = AutoStrategy::kFirstSupported;
  TuningRule tuning = {};  ///< of best_performance
  /// Where call sites record what they decide by these; null: the dispatcher's.
  std::shared_ptr<DecisionLog> log = nullptr;

  Preference choose(const OpDesc& op, const DeviceInfo& device) const;
};

}  // namespace xpuruntime

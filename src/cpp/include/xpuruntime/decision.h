// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/op.h"

namespace xpuruntime {

/// One kernel that could have run, and what became of it. A kernel that was measured with several
/// configurations stands here once for each.
struct Candidate {
  std::string id;      ///< or the word of a policy that no kernel is registered for
  std::string config;  ///< empty: the default choice
  /// Whether it can serve. What nobody had to look at, because another was found first, is not
  /// accepted.
  bool accepted = false;
  std::string reason;  ///< one sentence; empty only for what was chosen
  std::optional<double> measured_us;
};

/// Why the kernel that ran did.
enum class ChoiceSource : std::uint8_t {
  kPinned,    ///< the policy's short form, or the call's own `kernel`
  kRule,      ///< a rule of the policy
  kTuned,     ///< by times measured now or in the tuning cache: Tuner says how
  kFirst,     ///< the first that can serve
  kFallback,  ///< what was asked for cannot serve, and the policy only prefers it
};
std::string_view to_string(ChoiceSource source) noexcept;

/// One decision of the dispatcher: which kernel serves an operation, and why. Immutable but for the
/// count.
struct Decision {
  OpDesc op;
  std::string node, module;  ///< of the call site; may be empty
  std::vector<std::string> asked;
  std::string asked_by;  ///< "kernels.matmul", "kernels.rules[0]", "kernel=", "default"
  /// Every kernel registered for the operation, in the order of registration; after those, words
  /// that were asked for and name none.
  std::vector<Candidate> candidates;
  std::string chosen;  ///< id
  std::string config;
  ChoiceSource source = ChoiceSource::kFirst;
  /// What the user should know: a replacement, a tuning that was not possible, a cache entry that
  /// was dropped.
  std::vector<std::string> notes;
  /// Calls served since it was recorded.
  mutable std::atomic<std::uint64_t> count{0};
};

/// All of it as text for people, several lines.
std::string explain(const Decision& decision);

}  // namespace xpuruntime

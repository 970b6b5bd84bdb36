// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace xpuruntime {

/// The smallest difference that counts: a share of the control's time, and at least so many
/// microseconds. The same as Margin of the Python package's measuring.statistics.
struct Margin {
  double relative = 0.02;
  double absolute_us = 0;
  /// As a share of one control's microseconds.
  double of(double control_us) const noexcept;
};

/// What is known of a ratio of times: below the margin, above it, inside of it on both sides, or
/// nothing yet.
enum class Verdict : std::uint8_t { kFaster, kSlower, kTied, kInconclusive };
std::string_view to_string(Verdict verdict) noexcept;

/// A thing compared with a control that was measured in the same rounds.
struct PairedComparison {
  double ratio = 0, low = 0, high = 0;  ///< the median of the ratios, and its interval
  double margin = 0;                    ///< what counted, as a share of the control's time
  std::size_t rounds = 0;
  Verdict verdict = Verdict::kInconclusive;
  /// Not faster than the control by the margin; whether tied or slower is not decided.
  bool not_faster = false;
};

struct PairedOptions {
  double confidence = 0.99;  ///< one minus the chance that any of `family` gets a false verdict
  std::size_t looks = 1;     ///< how often the growing data are compared in all
  std::size_t family = 1;    ///< comparisons that are decided together
};

/// Decides whether times are below those of a control: `compare` of the Python package's
/// measuring.statistics with a margin that noise widens.
///
/// `times`, `control`, `twin`: microseconds, one of each in every round. The twin is the control
/// measured a second time in every round: it steadies the control, and what the two differ by,
/// twice, is the least gain or loss that counts. That a gain or loss is smaller than the margin is
/// shown only within the margin that was given, less what the two differ by. A verdict needs a sign
/// test of the log-ratios against the margin, which is exact for noise of any distribution, at `(1
/// - confidence) / family / looks`, and the interval on one side of the margin. The interval is
/// that of order statistics. Throws InputError when the three are not of the same, positive, number
/// of rounds, or a time is not positive.
PairedComparison compare_paired(std::span<const double> times, std::span<const double> control,
                                std::span<const double> twin, const Margin& margin,
                                const PairedOptions& options);

/// After how many rounds data are looked at, each time with a third more, from the first at which
/// unanimous rounds can decide at all. One look more is allowed for, at whatever round the budget
/// ends: give `compare_paired` the size plus one.
std::vector<std::size_t> look_rounds(std::size_t first, std::size_t last, double confidence,
                                     std::size_t family);

}  // namespace xpuruntime

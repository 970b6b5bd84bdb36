// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace xpuruntime {

/// How kernels are measured, and when one replaces another.
struct TuningRule {
  double min_effect = 0.02;  ///< a kernel has to be faster by this share
  double confidence = 0.99;  ///< one minus the chance that any of the candidates falsely replaces
  double seconds = 3.0;      ///< no round is begun after this time
  bool operator==(const TuningRule&) const = default;
};

/// Where a measurement stands.
struct TunerProgress {
  std::string_view op;
  std::size_t candidates = 0;               ///< that are still measured
  std::size_t rounds = 0, most_rounds = 0;  ///< both 0: before the candidates are prepared
  double seconds = 0;                       ///< since it began
};

/// Asked before candidates are prepared and before every round, from the thread that measures; true
/// ends the measurement there.
using TuningWatch = std::function<bool(const TunerProgress&)>;

}  // namespace xpuruntime

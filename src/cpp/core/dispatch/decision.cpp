// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/decision.h"

#include <array>
#include <cstdio>

namespace xpuruntime {
namespace {

std::string with_config(const std::string& id, const std::string& config) {
  return config.empty() ? id : id + "@" + config;
}

std::string microseconds(double value) {
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), "%.2f us", value);
  return text.data();
}

std::string_view meaning(ChoiceSource source) noexcept {
  switch (source) {
    case ChoiceSource::kPinned:
      return "as asked";
    case ChoiceSource::kRule:
      return "as a rule asks";
    case ChoiceSource::kTuned:
      return "by measured times";
    case ChoiceSource::kFirst:
      return "the first that can serve";
    case ChoiceSource::kFallback:
      return "instead of what was asked";
  }
  return {};
}

}  // namespace

std::string_view to_string(ChoiceSource source) noexcept {
  constexpr std::array<std::string_view, 5> names{"pinned", "rule", "tuned", "first", "fallback"};
  return names[static_cast<std::size_t>(source)];
}

std::string explain(const Decision& decision) {
  std::string text = describe(decision.op);
  if (!decision.node.empty()) text += ", node " + decision.node;
  if (!decision.module.empty()) text += ", module " + decision.module;
  text.append("\n  chosen: ").append(with_config(decision.chosen, decision.config));
  text.append(" (").append(meaning(decision.source)).append(")\n  asked: ");
  for (std::size_t i = 0; i < decision.asked.size(); ++i) {
    text.append(i > 0 ? ", " : "").append(decision.asked[i]);
  }
  text.append(" (").append(decision.asked_by).append(")");
  for (const Candidate& candidate : decision.candidates) {
    text.append(candidate.accepted ? "\n  can:    " : "\n  not:    ");
    text.append(with_config(candidate.id, candidate.config));
    if (candidate.measured_us) text.append(", ").append(microseconds(*candidate.measured_us));
    if (!candidate.reason.empty()) text.append(": ").append(candidate.reason);
  }
  for (const std::string& note : decision.notes) text.append("\n  note:   ").append(note);
  return text;
}

}  // namespace xpuruntime

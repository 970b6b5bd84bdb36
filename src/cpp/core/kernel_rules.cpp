// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/kernel_rules.h"

#include <algorithm>

namespace xpuruntime {
namespace {

// One character of UTF-8, and the text behind it. A byte that is no UTF-8 stands for itself.
char32_t next_character(std::string_view& text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t length = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  char32_t character = length == 1 ? first : first & (0xFFU >> (length + 1));
  bool whole = length <= text.size() && (length == 1 || (first >= 0xC2 && first < 0xF5));
  for (std::size_t i = 1; whole && i < length; ++i) {
    whole = (byte(i) & 0xC0U) == 0x80U;
    character = (character << 6U) | (byte(i) & 0x3FU);
  }
  text.remove_prefix(whole ? length : 1);
  return whole ? character : 0xDC00U + first;
}

// What stands between "[" and "]", or nothing when the bracket is never closed: then it is a
// character like others.
std::optional<std::string_view> set_of(std::string_view behind_bracket) noexcept {
  std::size_t end = behind_bracket.starts_with('!') ? 1 : 0;
  if (end < behind_bracket.size() && behind_bracket[end] == ']') ++end;
  end = behind_bracket.find(']', end);
  if (end == std::string_view::npos) return std::nullopt;
  return behind_bracket.substr(0, end);
}

bool in_set(std::string_view set, char32_t character) noexcept {
  const bool wanted = !set.starts_with('!');
  if (!wanted) set.remove_prefix(1);
  while (!set.empty()) {
    const char32_t first = next_character(set);
    char32_t last = first;
    if (set.size() > 1 && set.front() == '-') {
      set.remove_prefix(1);
      last = next_character(set);
    }
    if (first <= character && character <= last) return wanted;
  }
  return !wanted;
}

// Takes one character of both, if the pattern means it. The pattern does not begin with "*".
bool step(std::string_view& pattern, std::string_view& text) noexcept {
  if (pattern.empty() || text.empty()) return false;
  std::string_view rest = text;
  const char32_t character = next_character(rest);
  std::string_view behind = pattern;
  const char32_t wanted = next_character(behind);
  bool meant = wanted == character;
  if (wanted == U'?') {
    meant = true;
  } else if (wanted == U'[') {
    if (const auto set = set_of(behind)) {
      meant = in_set(*set, character);
      behind.remove_prefix(set->size() + 1);
    }
  }
  if (meant) {
    pattern = behind;
    text = rest;
  }
  return meant;
}

bool holds(const std::optional<IntRange>& stated, std::int64_t fact) noexcept {
  return !stated || (fact >= 0 && stated->contains(fact));
}

bool holds(const std::vector<std::string>& stated, std::string_view fact) noexcept {
  return stated.empty() ||
         (!fact.empty() && std::find(stated.begin(), stated.end(), fact) != stated.end());
}

bool holds_device(std::string_view stated, const OpDesc& op, const DeviceInfo& device) {
  if (stated.empty() || stated == "auto") return true;
  const std::string id = to_string(op.device);
  if (stated == id || stated == std::string_view(id).substr(0, id.find(':'))) return true;
  if (op.device.type != DeviceType::kCuda || !stated.starts_with("sm")) return false;
  const auto [major, minor] = device.compute_capability;
  return stated.substr(2) == std::to_string(major) + std::to_string(minor);
}

bool holds_pattern(std::string_view stated, std::string_view fact) noexcept {
  return stated.empty() || (!fact.empty() && matches_pattern(stated, fact));
}

}  // namespace

bool matches_pattern(std::string_view pattern, std::string_view text) noexcept {
  // Behind the last "*" seen, and the text that it was tried on: one more character is given to the
  // "*" whenever the rest does not fit.
  std::optional<std::string_view> behind_star;
  std::string_view tried;
  while (!text.empty()) {
    if (pattern.starts_with('*')) {
      pattern.remove_prefix(1);
      behind_star = pattern;
      tried = text;
    } else if (!step(pattern, text)) {
      if (!behind_star) return false;
      next_character(tried);
      pattern = *behind_star;
      text = tried;
    }
  }
  return pattern.find_first_not_of('*') == std::string_view::npos;
}

bool KernelMatch::matches(const OpDesc& desc, const DeviceInfo& info, std::string_view node_name,
                          std::string_view module_name) const {
  if (!op.empty() && op != policy_key(desc.kind)) return false;
  const OpFacts facts = facts_of(desc);
  return holds(m, facts.m) && holds(n, facts.n) && holds(k, facts.k) &&
         holds(head_dim, facts.head_dim) && holds(dtypes, facts.dtype) &&
         holds(phases, to_string(desc.phase)) && holds_device(device, desc, info) &&
         holds_pattern(node, node_name) && holds_pattern(module, module_name);
}

Preference KernelRules::choose(const OpDesc& op, const DeviceInfo& device, std::string_view node,
                               std::string_view module) const {
  for (const std::vector<KernelRule>* list : {&rules, &defaults}) {
    for (const KernelRule& rule : *list) {
      if (rule.use.empty() || !rule.match.matches(op, device, node, module)) continue;
      return {rule.use, rule.source, list == &rules};
    }
  }
  return {{"auto"}, "default", false};
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/kernel_rules.h"

#include <algorithm>

namespace xpuruntime {
namespace {

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

}  // namespace

bool KernelMatch::matches(const OpDesc& desc, const DeviceInfo& info) const {
  if (!op.empty() && op != policy_key(desc.kind)) return false;
  const OpFacts facts = facts_of(desc);
  return holds(m, facts.m) && holds(n, facts.n) && holds(k, facts.k) &&
         holds(head_dim, facts.head_dim) && holds(kv, facts.kv) && holds(dtypes, facts.dtype) &&
         holds(phases, to_string(desc.phase)) && holds_device(device, desc, info);
}

Preference KernelRules::choose(const OpDesc& op, const DeviceInfo& device) const {
  for (const std::vector<KernelRule>* list : {&rules, &defaults}) {
    for (const KernelRule& rule : *list) {
      if (rule.use.empty() || !rule.match.matches(op, device)) continue;
      return {rule.use, rule.source, list == &rules};
    }
  }
  return {{"auto"}, "default", false};
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "named_rules.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "xpuruntime/error.h"

namespace xpuruntime::ort {
namespace {

struct Named {
  std::shared_ptr<const KernelRules> rules;
  NamedRules::ByNode nodes;
};

struct Table {
  std::mutex mutex;
  std::uint64_t made = 0;
  std::unordered_map<std::string, Named> rules;
};

// Never destroyed: a handle may be given back when the process ends.
Table& table() {
  static Table* const made = new Table;
  return *made;
}

std::string prefix() {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  std::array<char, 24> text{};
  (void)std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
  return std::string("rules-") + text.data() + "-";
}

}  // namespace

NamedRules::NamedRules(std::shared_ptr<const KernelRules> rules, ByNode nodes) {
  bool lacks = rules == nullptr;
  for (const auto& one : nodes) lacks = lacks || one.second == nullptr;
  if (lacks) throw InputError("there are no rules to name: pass an empty KernelRules");
  static const std::string process = prefix();
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  key_ = process + std::to_string(++all.made);
  all.rules.emplace(key_, Named{std::move(rules), std::move(nodes)});
}

NamedRules::~NamedRules() {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  all.rules.erase(key_);
}

std::shared_ptr<const KernelRules> NamedRules::find(const std::string& key,
                                                    const std::string& node) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  const auto found = all.rules.find(key);
  if (found != all.rules.end()) {
    const auto own = found->second.nodes.find(node);
    return own == found->second.nodes.end() ? found->second.rules : own->second;
  }
  if (key.empty()) {
    throw InputError(
        "the attribute 'rules' is missing: it names the kernel policy of a session, so open the "
        "original model with xpuruntime.InferenceSession instead of the rewritten one");
  }
  throw InputError("the kernel rules '" + key +
                   "' are not known here: they hold in the process that made them, and until its "
                   "handle is gone. Open the original model with xpuruntime.InferenceSession "
                   "instead of the rewritten one");
}

}  // namespace xpuruntime::ort

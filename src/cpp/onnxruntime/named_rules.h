// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "xpuruntime/kernel_rules.h"

namespace xpuruntime::ort {

/// Rules under a name that a node of a graph can carry as an attribute, until this is destroyed.
/// Operators that were made meanwhile keep the rules; a later one does not find them.
///
/// Names are of this process: one that comes from another, in a graph that somebody stored, is
/// never mistaken for one of here. Thread-safe.
class NamedRules {
 public:
  using ByNode = std::unordered_map<std::string, std::shared_ptr<const KernelRules>>;

  /// `nodes`: the rules of nodes by their names; `rules`: those of every other one. Throws
  /// InputError without rules.
  explicit NamedRules(std::shared_ptr<const KernelRules> rules, ByNode nodes = {});
  ~NamedRules();
  NamedRules(const NamedRules&) = delete;
  NamedRules& operator=(const NamedRules&) = delete;

  const std::string& key() const noexcept { return key_; }

  /// Throws InputError, which says why a name may not be known.
  static std::shared_ptr<const KernelRules> find(const std::string& key, const std::string& node);

 private:
  std::string key_;
};

}  // namespace xpuruntime::ort

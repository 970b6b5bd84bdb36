// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/dispatcher.h"

#include <utility>

#include "dispatch/chooser.h"
#include "xpuruntime/runtime.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime {

Dispatcher::Dispatcher(KernelRegistry& registry, DeviceManager& devices, MemoryManager& memory)
    : registry_(registry),
      devices_(devices),
      memory_(memory),
      workspaces_(std::make_unique<Workspaces>(memory)) {}

Dispatcher::~Dispatcher() = default;

Dispatcher& Dispatcher::instance() { return Runtime::instance().dispatcher(); }

Choice Dispatcher::decide(const OpDesc& op, const KernelRules& rules, const DeviceInfo& device,
                          const std::string& node, const std::string& module,
                          const std::vector<std::string>& pin, bool prepare, bool may_measure) {
  return Chooser(*this, op, device, rules, prepare, may_measure).choose(node, module, pin);
}

void Dispatcher::set_tuning_store(std::shared_ptr<TuningStore> store) {
  std::shared_ptr<TuningStore> before;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  before = std::exchange(store_, std::move(store));
}

std::shared_ptr<TuningStore> Dispatcher::tuning_store() const {
  const std::lock_guard lock(mutex_);
  return store_;
}

void Dispatcher::set_tuning_watch(TuningWatch watch) {
  const std::lock_guard lock(mutex_);
  watch_.swap(watch);  // what was there goes after the lock
}

TuningWatch Dispatcher::tuning_watch() const {
  const std::lock_guard lock(mutex_);
  return watch_;
}

void Dispatcher::set_advisor(KernelAdvisor advisor) {
  const std::lock_guard lock(mutex_);
  advisor_.swap(advisor);  // what was there goes after the lock
}

KernelAdvisor Dispatcher::advisor() const {
  const std::lock_guard lock(mutex_);
  return advisor_;
}

void Dispatcher::forget_measurements() {
  const std::lock_guard lock(mutex_);
  measured_.clear();
}

std::optional<TunedEntry> Dispatcher::measured(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = measured_.find(key);
  if (found == measured_.end()) return std::nullopt;
  return found->second;
}

void Dispatcher::keep_measured(const std::string& key, const TunedEntry& entry) {
  const std::lock_guard lock(mutex_);
  measured_.insert_or_assign(key, entry);
}

}  // namespace xpuruntime

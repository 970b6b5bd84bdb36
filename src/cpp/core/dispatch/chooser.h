// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/dispatcher.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {

/// One decision in the making: asks the kernels of an operation in the order that rules and
/// strategy give, and writes down what each answered. For one use, by one thread.
class Chooser {
 public:
  /// Keeps the references: what they refer to outlives the object. `prepare` and `may_measure` as
  /// of Dispatcher::decide.
  Chooser(Dispatcher& dispatcher, const OpDesc& op, const DeviceInfo& device,
          const KernelRules& rules, bool prepare, bool may_measure);

  /// Throws as Dispatcher::decide does.
  Choice choose(const std::string& node, const std::string& module,
                const std::vector<std::string>& pin);

 private:
  struct Row {
    KernelRegistry::Definition kernel;
    std::optional<Support> fit;  ///< as far as it was asked: device, library, `supports`
    std::vector<Candidate> tried;
    std::string passed_over;  ///< why `first_supported` would rather take another
  };
  struct Measured;

  Support fit_without_library(const Row& row) const;
  bool fits(Row& row);
  // Another stream of this thread may be captured: that is not to be disturbed.
  void outside_capture(const std::function<void()>& body) const;
  std::shared_ptr<const Kernel> prepare(const Row& row, const std::string& config, Support& why);
  bool take(Row& row, const std::string& config);
  bool take_named(const std::string& word);
  bool take_auto();
  bool take_first();
  bool is_favoured(Row& row);

  // The strategy best_performance (chooser_tuning.cpp).
  bool take_fastest();
  bool take_known(const std::vector<Row*>& rows, const TunedEntry& entry);
  std::vector<Measured> prepare_all(const std::vector<Row*>& rows);
  bool take_measured(std::vector<Measured> candidates, const std::string& key,
                     std::map<std::string, std::string> validators);
  std::map<std::string, std::string> validators(const std::vector<Row*>& rows) const;
  void put_off(const std::string& why);

  std::string unknown(const std::string& word) const;
  std::string why_not_asked() const;
  std::vector<Candidate> verdicts();
  [[noreturn]] void refuse();

  Dispatcher& dispatcher_;
  const OpDesc& op_;
  const DeviceInfo& device_;
  const KernelRules& rules_;
  const bool prepare_;
  const bool may_measure_;

  std::vector<Row> rows_;
  Preference asked_;
  bool strict_ = false;
  std::vector<std::pair<std::string, std::string>> misses_;  ///< words that cannot serve, and why
  std::vector<Candidate> unknown_;
  std::vector<std::string> notes_;

  const Row* chosen_ = nullptr;
  std::shared_ptr<const Kernel> kernel_;
  std::string config_;
  ChoiceSource source_ = ChoiceSource::kFirst;
  bool unmeasured_ = false;
};

}  // namespace xpuruntime

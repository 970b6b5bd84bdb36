// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "dispatch/chooser.h"

#include <algorithm>
#include <utility>

#include "cuda_api.h"
#include "dispatch/nearest.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

std::string_view name_of(DeviceType type) { return type == DeviceType::kCpu ? "cpu" : "cuda"; }

std::string join(const std::vector<std::string>& words, std::string_view between) {
  std::string text;
  for (const std::string& word : words) text.append(text.empty() ? "" : between).append(word);
  return text;
}

}  // namespace

Chooser::Chooser(Dispatcher& dispatcher, const OpDesc& op, const DeviceInfo& device,
                 const KernelRules& rules, bool prepare, bool may_measure)
    : dispatcher_(dispatcher),
      op_(op),
      device_(device),
      rules_(rules),
      prepare_(prepare),
      may_measure_(may_measure) {
  for (KernelRegistry::Definition& kernel : dispatcher.registry().kernels(op.kind)) {
    rows_.push_back({std::move(kernel), std::nullopt, {}, {}});
  }
}

Choice Chooser::choose(const std::string& node, const std::string& module,
                       const std::vector<std::string>& pin) {
  asked_ = pin.empty() ? rules_.choose(op_, device_) : Preference{pin, "kernel=", false};
  strict_ = !pin.empty() || rules_.enforcement == Enforcement::kStrict;
  bool found = false;
  bool free_choice = false;
  for (const std::string& word : asked_.use) {
    free_choice = word == "auto";
    found = free_choice ? take_auto() : take_named(word);
    if (found || free_choice) break;
  }
  if (found && !free_choice) {
    source_ = asked_.from_rule ? ChoiceSource::kRule : ChoiceSource::kPinned;
  }
  if (!found && !free_choice && !strict_) {
    found = take_auto();
    if (found) {
      source_ = ChoiceSource::kFallback;
      notes_.push_back(asked_.source + " asks for " + why_not_asked() + "; " +
                       std::string(chosen_->kernel->id()) + " serves instead");
    }
  }
  if (!found) refuse();

  auto decision = std::make_shared<Decision>();
  decision->op = op_;
  decision->node = node;
  decision->module = module;
  decision->asked = asked_.use;
  decision->asked_by = asked_.source;
  decision->candidates = verdicts();
  decision->chosen = chosen_->kernel->id();
  decision->config = config_;
  decision->source = source_;
  decision->notes = std::move(notes_);
  const std::size_t workspace = kernel_ == nullptr ? 0 : kernel_->workspace_bytes();
  return {std::move(kernel_), std::move(decision), workspace, unmeasured_};
}

Support Chooser::fit_without_library(const Row& row) const {
  const DeviceType serves = row.kernel->backend().device_type();
  if (serves != op_.device.type) {
    return Support::no("serves " + std::string(name_of(serves)) + ", and the operands are on " +
                       to_string(op_.device));
  }
  return row.kernel->supports(op_, device_);
}

bool Chooser::fits(Row& row) {
  if (!row.fit) {
    Support fit = fit_without_library(row);
    if (fit.ok) fit = row.kernel->backend().available();
    if (fit.ok) {
      if (const KernelAdvisor advisor = dispatcher_.advisor()) {
        fit = advisor(*row.kernel, op_, device_);
      }
    }
    if (!fit.ok && fit.reason.empty()) fit.reason = "it refuses and gives no reason";
    row.fit = std::move(fit);
  }
  return row.fit->ok;
}

void Chooser::outside_capture(const std::function<void()>& body) const {
  if (op_.device.type == DeviceType::kCuda) {
    cuda::outside_capture(op_.device.index, body);
  } else {
    body();
  }
}

std::shared_ptr<const Kernel> Chooser::prepare(const Row& row, const std::string& config,
                                               Support& why) {
  std::shared_ptr<const Kernel> kernel;
  try {
    outside_capture([&] { kernel = row.kernel->prepare(op_, device_, config); });
  } catch (const UnsupportedOperationError& error) {
    why = Support::no(error.what());
    return nullptr;
  }
  if (kernel == nullptr) {
    why = Support::no("it prepared nothing and gives no reason");
  } else if (op_.attributes.deterministic && !kernel->repeatable()) {
    why = Support::no("may give other bits in another run, and deterministic work is asked for");
    kernel = nullptr;
  }
  return kernel;
}

bool Chooser::take(Row& row, const std::string& config) {
  if (!fits(row)) return false;
  std::shared_ptr<const Kernel> kernel;
  if (prepare_) {
    Support why;
    kernel = prepare(row, config, why);
    if (kernel == nullptr) {
      row.tried.push_back({std::string(row.kernel->id()), config, false, why.reason, {}});
      return false;
    }
  }
  chosen_ = &row;
  config_ = kernel == nullptr ? config : kernel->config();
  kernel_ = std::move(kernel);
  row.tried.push_back({std::string(row.kernel->id()), config_, true, {}, {}});
  return true;
}

bool Chooser::take_named(const std::string& word) {
  const std::size_t at = word.find('@');
  const std::string name = word.substr(0, at);
  const std::string config = at == std::string::npos ? std::string() : word.substr(at + 1);
  const auto meant = dispatcher_.registry().find(op_.kind, name);
  std::string reasons;
  bool known = false;
  for (Row& row : rows_) {
    if (std::find(meant.begin(), meant.end(), row.kernel) == meant.end()) continue;
    known = true;
    if (take(row, config)) return true;
    const std::string& why = row.fit->ok ? row.tried.back().reason : row.fit->reason;
    reasons.append(reasons.empty() ? "" : "; ").append(row.kernel->id()).append(": ").append(why);
  }
  if (!known) {
    reasons = unknown(name);
    unknown_.push_back({name, config, false, reasons, {}});
  }
  misses_.emplace_back(word, reasons);
  return false;
}

bool Chooser::take_auto() {
  return rules_.strategy == AutoStrategy::kBestPerformance ? take_fastest() : take_first();
}

bool Chooser::take_first() {
  // Twice: those that are known to be slow here only where no other can serve.
  for (const bool any : {false, true}) {
    for (Row& row : rows_) {
      if (!row.kernel->automatic() || !row.tried.empty()) continue;
      if (!any && fits(row) && !is_favoured(row)) continue;
      if (!take(row, {})) continue;
      source_ = ChoiceSource::kFirst;
      return true;
    }
  }
  return false;
}

bool Chooser::is_favoured(Row& row) {
  const Support answer = row.kernel->favoured(op_, device_);
  if (!answer.ok) row.passed_over = answer.reason;
  return answer.ok;
}

std::string Chooser::unknown(const std::string& word) const {
  if (std::string reason = why_not_built(word); !reason.empty()) {
    return reason + "; `xrt doctor` names the fix";
  }
  std::vector<std::string> ids;
  std::vector<std::string> words;
  for (const Row& row : rows_) {
    ids.emplace_back(row.kernel->id());
    words.emplace_back(row.kernel->id());
    words.emplace_back(row.kernel->backend().name());
    for (std::string& family : row.kernel->families()) words.push_back(std::move(family));
  }
  const std::string near = nearest_word(word, words);
  return "no such kernel is registered for " + std::string(to_string(op_.kind)) +
         (ids.empty() ? std::string("; there is none at all")
                      : "; registered are " + join(ids, ", ")) +
         (near.empty() ? std::string() : " (did you mean '" + near + "'?)");
}

// "cublasLt, which cannot serve (cublas.cublasLt: the reason)", for each word.
std::string Chooser::why_not_asked() const {
  std::string text;
  for (const auto& [word, reason] : misses_) {
    text.append(text.empty() ? "" : ", then ").append(word);
    text.append(", which cannot serve (").append(reason).append(")");
  }
  return text;
}

std::vector<Candidate> Chooser::verdicts() {
  std::vector<Candidate> all;
  for (Row& row : rows_) {
    const std::string id(row.kernel->id());
    if (!row.tried.empty()) {
      all.insert(all.end(), row.tried.begin(), row.tried.end());
      continue;
    }
    const Support fit = row.fit ? *row.fit : fit_without_library(row);
    if (!fit.ok) {
      all.push_back({id, {}, false, fit.reason, {}});
    } else {
      const std::string by_name = "is taken only where it is asked for";
      const bool automatic = row.kernel->automatic();
      const bool needed = chosen_ == nullptr;
      std::string why = needed ? (automatic ? "can serve, and is not what is asked for"
                                            : "can serve, and " + by_name)
                        : !row.passed_over.empty() ? "was passed over: " + row.passed_over
                        : automatic
                            ? "was not needed: " + std::string(chosen_->kernel->id()) + " serves"
                            : by_name;
      all.push_back({id, {}, needed, std::move(why), {}});
    }
  }
  all.insert(all.end(), unknown_.begin(), unknown_.end());
  return all;
}

void Chooser::refuse() {
  for (Row& row : rows_) (void)fits(row);
  const bool free_choice = asked_.use.back() == "auto";
  std::string text = "no kernel can serve " + describe(op_);
  if (!free_choice && strict_) {
    text = join(asked_.use, ", ") + " cannot serve " + describe(op_) + ", as " + asked_.source +
           " demands";
  } else if (!misses_.empty()) {
    text += ", and " + asked_.source + " asks for " + join(asked_.use, ", ");
  }
  text += ':';
  bool any = false;
  UnsupportedOperationError::Candidates candidates;
  for (const Candidate& one : verdicts()) {
    std::string kernel = one.config.empty() ? one.id : one.id + "@" + one.config;
    text.append("\n  ").append(kernel).append(": ").append(one.reason);
    candidates.emplace_back(std::move(kernel), one.reason);
    any = any || one.accepted;
  }
  if (rows_.empty()) text += "\n  none is registered";
  text +=
      any ? "\nAsk for one that can serve, or allow others: mode 'prefer', or 'auto' as the last "
            "kernel of " +
                asked_.source
          : "\nGive it operands that one of them can serve, or install what is missing";
  throw UnsupportedOperationError(text, to_string(op_.device), std::move(candidates));
}

}  // namespace xpuruntime

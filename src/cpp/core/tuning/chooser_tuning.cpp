// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <string_view>
#include <utility>

#include "dispatch/chooser.h"
#include "xpuruntime/error.h"
#include "xpuruntime/tuner.h"

namespace xpuruntime {
namespace {

constexpr std::size_t kMaxConfigs = 8;

std::string text(std::pair<int, int> version) {
  return std::to_string(version.first) + "." + std::to_string(version.second);
}

// Another protocol, or another rule of replacing, has another name: its entries do not hold.
constexpr std::string_view kProtocol = "3";
constexpr std::string_view kControl = "control";
constexpr std::string_view kEnded = "the tuning was cancelled, or its time is used up";

std::string slower(double time, double best, const std::string& winner) {
  std::array<char, 48> ratio{};
  (void)std::snprintf(ratio.data(), ratio.size(), "takes %.2f times as long as ", time / best);
  return ratio.data() + winner;
}

// Why a candidate does not replace `stays`, the control.
std::string not_replacing(double ratio, double low, double high, const std::string& stays,
                          bool open) {
  std::array<char, 80> text{};
  (void)std::snprintf(text.data(), text.size(), "takes %.3f [%.3f, %.3f] times as long as ", ratio,
                      low, high);
  return text.data() + stays + (open ? ", which is not decided, so that one stays" : "");
}

std::string suffix(const TuningRule& rule) {
  const TuningRule usual;
  if (rule.min_effect == usual.min_effect && rule.confidence == usual.confidence) return {};
  std::array<char, 64> text{};
  (void)std::snprintf(text.data(), text.size(), ";min_effect=%.6g;confidence=%.6g", rule.min_effect,
                      rule.confidence);
  return text.data();
}

}  // namespace

struct Chooser::Measured {
  Row* row = nullptr;
  std::shared_ptr<const Kernel> kernel;
  std::string config;
};

std::map<std::string, std::string> Chooser::validators(const std::vector<Row*>& rows) const {
  std::map<std::string, std::string> all{{"xpuruntime", XPURUNTIME_VERSION},
                                         {"protocol", std::string(kProtocol)}};
  all["device"] = device_.name;
  if (op_.device.type == DeviceType::kCuda) {
    const auto [major, minor] = device_.compute_capability;
    all["device"] += " sm" + std::to_string(major) + std::to_string(minor);
    all["driver"] = text(device_.driver_version);
  } else {
    all["cores"] = std::to_string(device_.cores);
  }
  std::string& kernels = all["kernels"];
  for (const Row* row : rows) {
    kernels.append(kernels.empty() ? "" : " ").append(row->kernel->id());
    const KernelBackend& backend = row->kernel->backend();
    all[std::string(backend.name())] = backend.version();
  }
  return all;
}

void Chooser::put_off(const std::string& why) {
  notes_.push_back("not measured: " + why + "; the first kernel that can serve is taken");
}

bool Chooser::take_fastest() {
  std::vector<Row*> rows;
  for (Row& row : rows_) {
    if (row.kernel->automatic() && fits(row)) rows.push_back(&row);
  }
  if (rows.empty()) return false;
  // What would run without measuring is the control.
  std::stable_partition(rows.begin(), rows.end(), [&](Row* row) { return is_favoured(*row); });
  const std::string key = device_.name + ";" + to_key(op_) + suffix(rules_.tuning);
  const auto valid = validators(rows);
  std::optional<TunedEntry> entry = dispatcher_.measured(key);
  if (entry && entry->validators != valid) entry.reset();
  if (!entry) {
    if (const auto store = dispatcher_.tuning_store()) {
      std::string note;
      entry = store->find(key, valid, note);
      if (!note.empty()) notes_.push_back(std::move(note));
      if (entry) dispatcher_.keep_measured(key, *entry);
    }
  }
  const bool again = entry && entry->undecided && entry->seconds < rules_.tuning.seconds &&
                     prepare_ && may_measure_;
  if (entry && !again && take_known(rows, *entry)) return true;
  if (!prepare_ || !may_measure_) {
    unmeasured_ = true;
    put_off(prepare_ ? "work is being captured into a graph" : "nothing runs while planning");
    return take_first();
  }
  if (const TuningWatch watch = dispatcher_.tuning_watch();
      watch && rows.size() > 1 && watch({to_string(op_.kind), rows.size(), 0, 0, 0})) {
    unmeasured_ = true;
    put_off(std::string(kEnded));
    return take_first();
  }
  return take_measured(prepare_all(rows), key, valid);
}

bool Chooser::take_known(const std::vector<Row*>& rows, const TunedEntry& entry) {
  double least = 0;
  for (const TunedTime& time : entry.times) {
    const auto found = std::find_if(
        rows.begin(), rows.end(), [&](const Row* row) { return row->kernel->id() == time.kernel; });
    if (found == rows.end()) continue;
    if (chosen_ == nullptr) {
      if (!take(**found, time.config)) {
        notes_.push_back("the tuning cache names " + time.kernel +
                         (time.config.empty() ? "" : "@" + time.config) +
                         ", which cannot be prepared: " + (*found)->tried.back().reason);
        continue;
      }
      (*found)->tried.back().measured_us = least = time.microseconds;
      source_ = ChoiceSource::kTuned;
    } else {
      const std::string chosen(chosen_->kernel->id());
      const bool open = time.verdict == to_string(Verdict::kInconclusive);
      const bool paired = entry.times.front().verdict == kControl && time.low < time.high;
      (*found)->tried.push_back({time.kernel, time.config, true,
                                 paired || open
                                     ? not_replacing(time.ratio, time.low, time.high, chosen, open)
                                     : slower(time.microseconds, least, chosen),
                                 time.microseconds});
    }
  }
  return chosen_ != nullptr;
}

std::vector<Chooser::Measured> Chooser::prepare_all(const std::vector<Row*>& rows) {
  std::vector<Measured> all;
  for (Row* row : rows) {
    const std::string id(row->kernel->id());
    const auto reject = [&](const std::string& config, const std::string& why) {
      row->tried.push_back({id, config, false, why, {}});
    };
    std::vector<std::string> configs;
    try {
      outside_capture([&] { configs = row->kernel->configs(op_, device_, kMaxConfigs); });
    } catch (const std::exception& error) {
      reject({}, error.what());
      continue;
    }
    if (configs.empty()) configs.emplace_back();
    std::vector<std::string> seen;
    for (const std::string& config : configs) {
      Support why;
      std::shared_ptr<const Kernel> kernel;
      try {
        kernel = prepare(*row, config, why);
      } catch (const std::exception& error) {
        why = Support::no(error.what());
      }
      if (kernel == nullptr) {
        reject(config, why.reason);
        continue;
      }
      std::string settled = kernel->config();
      if (std::find(seen.begin(), seen.end(), settled) != seen.end()) continue;
      seen.push_back(settled);
      all.push_back({row, std::move(kernel), std::move(settled)});
    }
  }
  return all;
}

bool Chooser::take_measured(std::vector<Measured> candidates, const std::string& key,
                            std::map<std::string, std::string> validators) {
  const auto choose = [&](Measured& one, ChoiceSource source) {
    chosen_ = one.row;
    kernel_ = one.kernel;
    config_ = one.config;
    source_ = source;
    return true;
  };
  const auto verdict = [](const Measured& one, bool accepted, std::string reason,
                          std::optional<double> time) {
    one.row->tried.push_back(
        {std::string(one.row->kernel->id()), one.config, accepted, std::move(reason), time});
  };
  if (candidates.empty()) return false;
  if (candidates.size() == 1) {
    verdict(candidates[0], true, {}, {});
    return choose(candidates[0], ChoiceSource::kFirst);
  }
  std::vector<std::shared_ptr<const Kernel>> kernels;
  kernels.reserve(candidates.size());
  for (const Measured& one : candidates) kernels.push_back(one.kernel);
  const auto take_control = [&](std::size_t control, const std::string& why) {
    put_off(why);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (i != control) verdict(candidates[i], true, "can serve, and comes later", {});
    }
    verdict(candidates[control], true, {}, {});
    return choose(candidates[control], ChoiceSource::kFirst);
  };
  TunerResult result;
  TunerOptions options;
  options.rule = rules_.tuning;
  options.watch = dispatcher_.tuning_watch();
  try {
    outside_capture([&] {
      result = Tuner(dispatcher_.devices(), dispatcher_.memory()).measure(op_, kernels, options);
    });
  } catch (const OutOfMemoryError& error) {
    return take_control(0, error.what());
  }
  if (result.cancelled && result.best) {
    unmeasured_ = true;
    return take_control(*result.best, std::string(kEnded));
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const TunerTime& time = result.times[i];
    if (!time.microseconds) verdict(candidates[i], false, time.reason, {});
  }
  if (!result.best) return false;
  Measured& best = candidates[*result.best];
  const double least = *result.times[*result.best].microseconds;
  const std::string winner(best.row->kernel->id());
  TunedEntry entry;
  entry.validators = std::move(validators);
  entry.rounds = result.rounds;
  entry.seconds = rules_.tuning.seconds;
  entry.undecided = result.undecided;
  std::vector<std::pair<int, double>> order;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const TunerTime& one = result.times[i];
    if (!one.microseconds) continue;
    const bool chosen = i == *result.best;
    TunedTime time;
    time.kernel = candidates[i].row->kernel->id();
    time.config = candidates[i].config;
    time.microseconds = *one.microseconds;
    std::string reason;
    if (!one.reason.empty()) {  // dropped: its time is of other rounds than that of the winner
      reason = one.reason;
    } else if (!chosen) {
      reason = slower(time.microseconds, least, winner);
    }
    int rank = 3;
    double within = time.microseconds;
    if (const auto& found = one.comparison) {
      time.ratio = found->ratio;
      time.low = found->low;
      time.high = found->high;
      time.verdict = to_string(found->verdict);
      if (found->verdict == Verdict::kInconclusive && found->not_faster) {
        time.verdict = "not_faster";
      } else if (found->verdict == Verdict::kFaster) {
        rank = 1;
        within = found->ratio;
      }
      if (!chosen && !result.times[*result.best].comparison) {  // the control stays
        reason = not_replacing(found->ratio, found->low, found->high, winner,
                               time.verdict == to_string(Verdict::kInconclusive));
      }
    } else {
      const bool control = one.reason.empty();
      time.verdict = control ? kControl : "slower";
      if (control) rank = 2;
    }
    order.emplace_back(chosen ? 0 : rank, within);
    entry.times.push_back(std::move(time));
    verdict(candidates[i], true, std::move(reason), one.microseconds);
  }
  // The chosen one, then what is faster than the control, then that, then the others.
  std::vector<std::size_t> places(order.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t left, std::size_t right) { return order[left] < order[right]; });
  std::vector<TunedTime> sorted;
  sorted.reserve(places.size());
  for (const std::size_t place : places) sorted.push_back(std::move(entry.times[place]));
  entry.times = std::move(sorted);
  dispatcher_.keep_measured(key, entry);
  if (const auto store = dispatcher_.tuning_store()) {
    std::string note;
    store->put(key, entry, note);
    if (!note.empty()) notes_.push_back(std::move(note));
  }
  return choose(best, ChoiceSource::kTuned);
}

}  // namespace xpuruntime

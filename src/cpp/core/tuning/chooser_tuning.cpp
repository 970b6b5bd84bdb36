// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <array>
#include <cstdio>
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

std::string slower(double time, double best, const std::string& winner) {
  std::array<char, 48> ratio{};
  (void)std::snprintf(ratio.data(), ratio.size(), "takes %.2f times as long as ", time / best);
  return ratio.data() + winner;
}

}  // namespace

struct Chooser::Measured {
  Row* row = nullptr;
  std::shared_ptr<const Kernel> kernel;
  std::string config;
};

std::map<std::string, std::string> Chooser::validators(const std::vector<Row*>& rows) const {
  std::map<std::string, std::string> all{{"xpuruntime", XPURUNTIME_VERSION}};
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
  const std::string key = device_.name + ";" + to_key(op_);
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
  if (entry && take_known(rows, *entry)) return true;
  if (!prepare_ || !may_measure_) {
    unmeasured_ = true;
    put_off(prepare_ ? "work is being captured into a graph" : "nothing runs while planning");
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
      (*found)->tried.push_back(
          {time.kernel, time.config, true,
           slower(time.microseconds, least, std::string(chosen_->kernel->id())),
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
  TunerResult result;
  try {
    outside_capture(
        [&] { result = Tuner(dispatcher_.devices(), dispatcher_.memory()).measure(op_, kernels); });
  } catch (const OutOfMemoryError& error) {
    put_off(error.what());
    for (std::size_t i = 1; i < candidates.size(); ++i) {
      verdict(candidates[i], true, "can serve, and comes later", {});
    }
    verdict(candidates[0], true, {}, {});
    return choose(candidates[0], ChoiceSource::kFirst);
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const TunerTime& time = result.times[i];
    if (!time.microseconds) verdict(candidates[i], false, time.reason, {});
  }
  if (!result.best) return false;
  Measured& best = candidates[*result.best];
  const double least = *result.times[*result.best].microseconds;
  TunedEntry entry{{}, std::move(validators)};
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto& time = result.times[i].microseconds;
    if (!time) continue;
    const std::string id(candidates[i].row->kernel->id());
    entry.times.push_back({id, candidates[i].config, *time});
    verdict(candidates[i], true,
            i == *result.best ? std::string()
                              : slower(*time, least, std::string(best.row->kernel->id())),
            time);
  }
  // The chosen one first: it may be slower by what counts as a tie.
  std::stable_sort(
      entry.times.begin(), entry.times.end(), [&](const auto& left, const auto& right) {
        const auto rank = [&](const TunedTime& one) {
          return std::pair(one.kernel != best.row->kernel->id() || one.config != best.config,
                           one.microseconds);
        };
        return rank(left) < rank(right);
      });
  dispatcher_.keep_measured(key, entry);
  if (const auto store = dispatcher_.tuning_store()) {
    std::string note;
    store->put(key, entry, note);
    if (!note.empty()) notes_.push_back(std::move(note));
  }
  return choose(best, ChoiceSource::kTuned);
}

}  // namespace xpuruntime

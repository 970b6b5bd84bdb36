// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/tuner.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <utility>

#include "cuda_api.h"
#include "tuning/tuner_operands.h"
#include "xpuruntime/error.h"
#include "xpuruntime/event.h"
#include "xpuruntime/graph.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/memory_pool.h"
#include "xpuruntime/stream.h"

namespace xpuruntime {
namespace {

constexpr std::size_t kMaxLaunches = 1024;         // in one run of one candidate
constexpr double kMinRun = 300, kMaxRun = 20'000;  // microseconds of one run
constexpr double kHopeless = 2.0;
constexpr std::size_t kRoundsBeforeDrop = 2;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::size_t last_cache(DeviceId device) {
  if (device.type == DeviceType::kCuda) return cuda::cache_bytes(device.index);
  constexpr long kUnknown = 32L << 20U, kMost = 128L << 20U;
  long bytes = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return static_cast<std::size_t>(std::min(bytes > 0 ? bytes : kUnknown, kMost));
}

// Runs one candidate's launches and says how long one took.
class Runner {
 public:
  Runner(const Kernel& kernel, const TunerOperands& operands, const Stream& stream)
      : kernel_(kernel), operands_(operands), stream_(stream) {}

  // A first launch, which shows whether it works, and then the number of launches of a run.
  void prepare() {
    launch(0);
    stream_.synchronize();
    launches_ = count_launches(cuda() ? timed([&] { launch(1); }) : timed_here(1));
    if (!cuda()) return;
    graph_.begin_capture(stream_);
    for (std::size_t i = 0; i < launches_; ++i) launch(i);
    graph_.end_capture();
    graph_.instantiate();
    graph_.replay(stream_);
    stream_.synchronize();
  }

  double run() {
    if (!cuda()) return timed_here(launches_) / static_cast<double>(launches_);
    return timed([&] { graph_.replay(stream_); }) / static_cast<double>(launches_);
  }

 private:
  // On CUDA all sets in turn, for a run always begins with the first one; unless that takes so long
  // that reading them from memory, all together in some hundredths of a millisecond, does not show.
  std::size_t count_launches(double once) const {
    once = std::max(once, 0.5);
    const auto wanted = std::min(static_cast<std::size_t>(kMinRun / once) + 1, kMaxLaunches);
    if (!cuda()) return wanted;
    const std::size_t sets = operands_.sets();
    const auto most = std::max<std::size_t>(static_cast<std::size_t>(kMaxRun / once), 2);
    if (most < sets) return most;
    return std::max(std::min((wanted + sets - 1) / sets * sets, kMaxLaunches / sets * sets), sets);
  }

  bool cuda() const { return stream_.device().type == DeviceType::kCuda; }

  void launch(std::size_t index) const {
    if (cuda()) {
      cuda::launch_kernel(stream_.device().index, kernel_, operands_.set(index),
                          operands_.workspace(), stream_.handle());
    } else {
      kernel_.launch(operands_.set(index), operands_.workspace(), 0);
    }
  }

  template <typename Body>
  double timed(const Body& body) const {
    const Event start = stream_.record(true);
    body();
    const Event end = stream_.record(true);
    end.synchronize();
    return Event::elapsed_us(start, end);
  }

  // Goes on with the set at which it stopped.
  double timed_here(std::size_t launches) {
    const Clock::time_point start = Clock::now();
    for (std::size_t i = 0; i < launches; ++i) launch(next_++);
    return seconds_since(start) * 1e6;
  }

  const Kernel& kernel_;
  const TunerOperands& operands_;
  const Stream stream_;
  std::size_t launches_ = 1;
  std::size_t next_ = 0;
  Graph graph_;
};

struct Entrant {
  std::unique_ptr<Runner> runner;
  std::vector<double> times;
};

// Runs `body`; whatever it throws is the reason to reject the candidate.
template <typename Body>
void attempt(std::unique_ptr<Runner>& runner, TunerTime& time, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    time.reason = std::string("failed while it was measured: ") + error.what();
    runner.reset();
  }
}

std::size_t count_sets(std::size_t set, std::size_t cache, std::size_t room) {
  const std::size_t wanted = std::clamp<std::size_t>(2 * cache / set + 1, 2, kMaxLaunches);
  return std::max<std::size_t>(std::min(wanted, room / set), 1);
}

// The candidates in rounds, against the first of them that works.
class Race {
 public:
  Race(std::vector<Entrant>& candidates, TunerResult& result, const TunerOptions& options,
       std::string_view op, Clock::time_point start)
      : candidates_(candidates), result_(result), options_(options), op_(op), start_(start) {}

  void run() {
    while (const std::optional<std::size_t> first = first_working()) {
      control_ = *first;
      if (run_against_control()) return;
      for (Entrant& entrant : candidates_)
        entrant.times.clear();  // the control failed: another is that
    }
  }

 private:
  std::optional<std::size_t> first_working() const {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (candidates_[i].runner) return i;
    }
    return std::nullopt;
  }

  std::size_t working() const {
    return static_cast<std::size_t>(
        std::count_if(candidates_.begin(), candidates_.end(),
                      [](const Entrant& entrant) { return entrant.runner != nullptr; }));
  }

  // False when the control failed.
  bool run_against_control() {
    twin_.clear();
    family_ = std::max<std::size_t>(working() - 1, 1);
    looks_ = look_rounds(options_.first_look, options_.rounds, options_.rule.confidence, family_);
    result_.rounds = 0;
    while (working() > 1 && result_.rounds < looks_.back()) {
      const double seconds = seconds_since(start_);
      if (result_.rounds > 0 && seconds > options_.rule.seconds) break;
      if (options_.watch &&
          options_.watch({op_, working(), result_.rounds, looks_.back(), seconds})) {
        result_.cancelled = true;
        break;
      }
      if (!run_round()) return false;
      if (result_.rounds == kRoundsBeforeDrop) drop_slow();
      if (std::binary_search(looks_.begin(), looks_.end(), result_.rounds) && decided()) break;
    }
    if (result_.rounds == 0 && !result_.cancelled && !run_round()) return false;
    decide();
    return true;
  }

  // ABBA, and another one first in every pair of rounds.
  bool run_round() {
    std::vector<std::size_t> turns{control_};
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (i != control_ && candidates_[i].runner) turns.push_back(i);
    }
    const std::size_t again = candidates_.size();  // the control's second turn
    turns.push_back(again);
    const auto first = static_cast<std::ptrdiff_t>(result_.rounds / 2 % turns.size());
    std::rotate(turns.begin(), turns.begin() + first, turns.end());
    if (result_.rounds % 2 == 1) std::reverse(turns.begin(), turns.end());
    for (const std::size_t turn : turns) {
      const std::size_t i = turn == again ? control_ : turn;
      Entrant& entrant = candidates_[i];
      if (!entrant.runner) continue;
      std::vector<double>& times = turn == again ? twin_ : entrant.times;
      attempt(entrant.runner, result_.times[i], [&] { times.push_back(entrant.runner->run()); });
    }
    ++result_.rounds;
    return candidates_[control_].runner != nullptr;
  }

  // Drops what took more than twice the time of the best in every round so far: one round alone may
  // have been interrupted by other work of the machine.
  void drop_slow() {
    std::vector<double> fastest(candidates_.size());
    double least = 0;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (!candidates_[i].runner) continue;
      const auto& times = candidates_[i].times;
      fastest[i] = *std::min_element(times.begin(), times.end());
      if (least == 0 || fastest[i] < least) least = fastest[i];
    }
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (i == control_ || !candidates_[i].runner || fastest[i] <= kHopeless * least) continue;
      result_.times[i].microseconds = fastest[i];
      result_.times[i].reason = "took more than twice the time of the best in the first two rounds";
      candidates_[i].runner.reset();
    }
  }

  PairedComparison compare(const Entrant& entrant) const {
    return compare_paired(entrant.times, candidates_[control_].times, twin_,
                          {options_.rule.min_effect, 0},
                          {options_.rule.confidence, looks_.size() + 1, family_});
  }

  bool decided() const {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (i == control_ || !candidates_[i].runner) continue;
      const PairedComparison found = compare(candidates_[i]);
      if (found.verdict != Verdict::kFaster && !found.not_faster) return false;
    }
    return true;
  }

  void decide() {
    result_.best = control_;
    if (result_.rounds == 0) return;
    double least = 1;
    bool open = false;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      if (!candidates_[i].runner) continue;
      result_.times[i].microseconds = median(candidates_[i].times);
      if (i == control_) continue;
      const PairedComparison found = compare(candidates_[i]);
      result_.times[i].comparison = found;
      open = open || (found.verdict != Verdict::kFaster && !found.not_faster);
      if (found.verdict == Verdict::kFaster && found.ratio < least) {
        least = found.ratio;
        result_.best = i;
      }
    }
    result_.undecided = open && result_.best == control_;
  }

  std::vector<Entrant>& candidates_;
  TunerResult& result_;
  const TunerOptions& options_;
  const std::string_view op_;
  const Clock::time_point start_;
  std::size_t control_ = 0, family_ = 1;
  std::vector<double> twin_;
  std::vector<std::size_t> looks_;
};

}  // namespace

TunerResult Tuner::measure(const OpDesc& op,
                           std::span<const std::shared_ptr<const Kernel>> candidates,
                           const TunerOptions& options) {
  static std::recursive_mutex one_at_a_time;  // a candidate may call operations itself
  const std::lock_guard lock(one_at_a_time);
  const Clock::time_point start = Clock::now();
  TunerResult result;
  result.times.resize(candidates.size());
  if (candidates.empty()) return result;

  const OperandPlan plan(op);
  std::size_t workspace = 0;
  for (const auto& kernel : candidates) workspace = std::max(workspace, kernel->workspace_bytes());
  const std::shared_ptr<MemoryPool> pool = memory_.default_pool(op.device);
  const MemoryStats before = pool->stats();
  const std::size_t free = devices_.memory_info(op.device).free + before.cached;
  if (plan.total + workspace > free / 2) {
    throw OutOfMemoryError("one set of operands and scratch memory takes " +
                               std::to_string(plan.total + workspace) + " bytes, and of the " +
                               std::to_string(free) + " that are free on " + to_string(op.device) +
                               " measuring may take half",
                           to_string(op.device), plan.total + workspace);
  }
  const std::size_t room = std::min(options.memory, free / 2 - workspace);
  const Stream stream =
      op.device.type == DeviceType::kCuda ? Stream::create(op.device) : Stream::wrap(op.device, 0);
  {
    const TunerOperands operands(op, plan, count_sets(plan.total, last_cache(op.device), room),
                                 workspace, *pool, stream);
    result.sets = operands.sets();
    result.operand_bytes = plan.total * operands.sets();

    std::vector<Entrant> running(candidates.size());
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      running[i].runner = std::make_unique<Runner>(*candidates[i], operands, stream);
      attempt(running[i].runner, result.times[i], [&] { running[i].runner->prepare(); });
    }
    Race(running, result, options, to_string(op.kind), start).run();
    stream.synchronize();
  }
  (void)pool->trim(before.cached);
  return result;
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/tuner.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>
#include <random>
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
constexpr double kTie = 1.01, kHopeless = 2.0;
constexpr std::size_t kRoundsBeforeStop = 3, kRoundsBeforeDrop = 2;

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

struct Candidate {
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

std::size_t count_sets(std::size_t one, std::size_t cache, std::size_t room) {
  const std::size_t wanted = std::clamp<std::size_t>(2 * cache / one + 1, 2, kMaxLaunches);
  return std::max<std::size_t>(std::min(wanted, room / one), 1);
}

// Whether every time of the best is below every time of all others that are left.
bool settled(const std::vector<Candidate>& candidates) {
  const Candidate* best = nullptr;
  for (const Candidate& one : candidates) {
    if (!one.runner) continue;
    if (best == nullptr || median(one.times) < median(best->times)) best = &one;
  }
  if (best == nullptr) return true;
  const double slowest = *std::max_element(best->times.begin(), best->times.end());
  return std::all_of(candidates.begin(), candidates.end(), [&](const Candidate& one) {
    return &one == best || !one.runner ||
           *std::min_element(one.times.begin(), one.times.end()) > slowest;
  });
}

// Drops what took more than twice the time of the best in every round so far: one round alone may
// have been interrupted by other work of the machine.
void drop_slow(std::vector<Candidate>& candidates, TunerResult& result) {
  std::vector<double> fastest(candidates.size());
  double least = 0;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!candidates[i].runner) continue;
    fastest[i] = *std::min_element(candidates[i].times.begin(), candidates[i].times.end());
    if (least == 0 || fastest[i] < least) least = fastest[i];
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!candidates[i].runner || fastest[i] <= kHopeless * least) continue;
    result.times[i].microseconds = fastest[i];
    result.times[i].reason = "took more than twice the time of the best in the first two rounds";
    candidates[i].runner.reset();
  }
}

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

    std::vector<Candidate> running(candidates.size());
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      running[i].runner = std::make_unique<Runner>(*candidates[i], operands, stream);
      attempt(running[i].runner, result.times[i], [&] { running[i].runner->prepare(); });
    }
    // NOLINTNEXTLINE(bugprone-random-generator-seed): the same order every time
    std::mt19937 random(20'260'101);
    std::vector<std::size_t> order(candidates.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (int round = 0; round <= options.rounds; ++round) {
      if (round > 0 && seconds_since(start) > options.seconds) break;
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        Candidate& one = running[i];
        if (!one.runner) continue;
        attempt(one.runner, result.times[i], [&] { one.times.push_back(one.runner->run()); });
      }
      ++result.rounds;
      if (static_cast<std::size_t>(result.rounds) > kRoundsBeforeStop && settled(running)) break;
      if (static_cast<std::size_t>(result.rounds) == kRoundsBeforeDrop) drop_slow(running, result);
    }
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i].runner) result.times[i].microseconds = median(running[i].times);
    }
    stream.synchronize();
  }
  (void)pool->trim(before.cached);

  double least = 0;
  for (const TunerTime& time : result.times) {
    if (time.microseconds && (least == 0 || *time.microseconds < least)) least = *time.microseconds;
  }
  for (std::size_t i = 0; i < result.times.size() && !result.best; ++i) {
    const auto& time = result.times[i].microseconds;
    if (time && *time <= kTie * least) result.best = i;
  }
  return result;
}

}  // namespace xpuruntime

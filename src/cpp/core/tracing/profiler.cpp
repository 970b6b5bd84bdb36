// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/profiler.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda_api.h"
#include "streams/event_timing.h"
#include "tracing/device_activity.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::int64_t thread_number() noexcept {
  thread_local const std::int64_t number = syscall(SYS_gettid);
  return number;
}

// The ranges that the calling thread is in, of one recording.
struct Open {
  struct Entry {
    std::uint64_t id = 0;
    std::string label;
    std::optional<std::size_t> timed;
  };
  std::uint64_t recording = 0;
  std::vector<Entry> entries;
};
thread_local Open t_open;

// Ids of ranges: the recording above, the place in it (from 1) below.
constexpr unsigned kPlaceBits = 40;
constexpr std::uint64_t kPlaceMask = (std::uint64_t{1} << kPlaceBits) - 1;

}  // namespace

std::string_view to_string(WorkKind kind) noexcept {
  switch (kind) {
    case WorkKind::kKernel:
      return "kernel";
    case WorkKind::kCopy:
      return "copy";
    case WorkKind::kFill:
      return "fill";
    case WorkKind::kWait:
      return "wait";
    case WorkKind::kAllocation:
      return "allocation";
    case WorkKind::kRelease:
      return "release";
  }
  return "?";
}

std::string_view to_string(WorkSource source) noexcept {
  switch (source) {
    case WorkSource::kNone:
      return "none";
    case WorkSource::kCupti:
      return "cupti";
    case WorkSource::kEvents:
      return "events";
  }
  return "?";
}

struct Profiler::State {
  std::mutex control;  // start and stop
  std::mutex mutex;    // what follows
  std::uint64_t recording = 0;
  std::size_t limit = kDefaultLimit;
  std::uint64_t dropped = 0;
  Recording kept;
  std::unique_ptr<EventTiming> timing;
};

std::atomic<bool> Profiler::active_{false};

Profiler::Profiler() : state_(std::make_unique<State>()) {}
Profiler::~Profiler() = default;

Profiler& Profiler::instance() {
  static auto* const profiler = new Profiler;  // for threads that outlive the end of main
  return *profiler;
}

void Profiler::start(bool devices, std::size_t limit) {
  State& state = *state_;
  const std::lock_guard control(state.control);
  if (active()) {
    throw InputError(
        "a recording goes on already, and there is one at a time in a process: end it first");
  }
  Recording next;
  std::unique_ptr<EventTiming> timing;
  if (devices) {
    std::string none;
    if (cuda::enumerate(none).empty()) {
      next.reason = none;
    } else {
      next.reason = activity::start(limit);
      next.source = next.reason.empty() ? WorkSource::kCupti : WorkSource::kEvents;
    }
    if (next.source == WorkSource::kEvents) {
      timing = std::make_unique<EventTiming>();
      timing->set_limit(limit);
    }
  }
  next.start_ns = now_ns();
  const std::lock_guard lock(state.mutex);
  ++state.recording;
  state.limit = std::min<std::size_t>(limit, kPlaceMask - 1);
  state.dropped = 0;
  state.kept = std::move(next);
  state.timing = std::move(timing);
  active_.store(true);
}

Recording Profiler::stop() {
  State& state = *state_;
  const std::lock_guard control(state.control);
  if (!active()) throw InputError("no recording goes on: start one first");
  active_.store(false);
  Recording found;
  std::unique_ptr<EventTiming> timing;
  std::uint64_t recording = 0;
  {
    const std::lock_guard lock(state.mutex);
    recording = state.recording;
    found = std::exchange(state.kept, {});
    timing = std::move(state.timing);
    found.dropped = state.dropped;
  }
  if (found.source == WorkSource::kCupti) {
    activity::Collected collected = activity::stop();
    found.work = std::move(collected.work);
    found.calls = std::move(collected.calls);
    found.dropped += collected.dropped;
  } else if (timing != nullptr) {
    found.work = timing->take();
    found.dropped += timing->lost();
  }
  for (WorkRecord& work : found.work) {  // started in a range that an earlier recording left open
    if (work.range >> kPlaceBits != recording) work.range = 0;
  }
  std::stable_sort(
      found.work.begin(), found.work.end(),
      [](const WorkRecord& a, const WorkRecord& b) { return a.start_ns < b.start_ns; });
  found.end_ns = now_ns();
  for (RangeRecord& range : found.ranges) {
    if (range.end_ns == 0) {
      range.end_ns = found.end_ns;
      range.finished = false;
    }
  }
  return found;
}

std::uint64_t Profiler::begin(std::string_view name, std::string_view category) {
  return begin(name, category, {}, 0);
}

std::uint64_t Profiler::begin(std::string_view name, std::string_view category, DeviceId device,
                              StreamHandle stream) {
  State& state = *state_;
  const std::string label(name);
  WorkSource source{};
  std::size_t ended = 0;
  RangeRecord record;
  record.name = label;
  record.category = category;
  record.thread = thread_number();
  {
    const std::lock_guard lock(state.mutex);
    if (!active()) return 0;
    if (state.kept.ranges.size() >= state.limit) {
      ++state.dropped;
      return 0;
    }
    if (t_open.recording != state.recording) t_open = {.recording = state.recording, .entries = {}};
    std::vector<Open::Entry>& open = t_open.entries;
    // Some may have been ended by another thread.
    while (!open.empty() && state.kept.ranges[(open.back().id & kPlaceMask) - 1].end_ns != 0) {
      open.pop_back();
      ++ended;
    }
    record.id = state.recording << kPlaceBits | (state.kept.ranges.size() + 1);
    record.parent = open.empty() ? 0 : open.back().id;
    record.start_ns = now_ns();
    open.push_back({.id = record.id, .label = label, .timed = {}});
    source = state.kept.source;
    if (state.timing != nullptr && device.type == DeviceType::kCuda) {
      open.back().timed = state.timing->begin(record.id, label, device.index, stream);
    }
    state.kept.ranges.push_back(record);
  }
  for (; ended > 0; --ended) {
    activity::hide();
    if (source == WorkSource::kCupti) activity::leave();
  }
  if (source == WorkSource::kCupti) activity::enter(record.id);
  activity::show(label.c_str());
  return record.id;
}

void Profiler::end(std::uint64_t id) noexcept {
  if (id == 0) return;
  State& state = *state_;
  const std::int64_t at = now_ns();
  std::vector<Open::Entry>& open = t_open.entries;
  const auto found = std::find_if(open.begin(), open.end(),
                                  [&](const Open::Entry& entry) { return entry.id == id; });
  // Those begun inside it and not ended yet, such as a generator's, are left and entered again.
  const auto inside = static_cast<std::size_t>(found == open.end() ? 0 : open.end() - found);
  std::optional<std::size_t> timed;
  if (found != open.end()) {
    timed = found->timed;
    open.erase(found);
  }
  WorkSource source{};
  {
    const std::lock_guard lock(state.mutex);
    if (!active() || state.recording != id >> kPlaceBits) {
      source = WorkSource::kNone;
    } else {
      source = state.kept.source;
      state.kept.ranges[(id & kPlaceMask) - 1].end_ns = at;
      if (timed && state.timing != nullptr) state.timing->end(*timed);
    }
  }
  for (std::size_t left = 0; left < inside; ++left) {
    activity::hide();
    if (source == WorkSource::kCupti) activity::leave();
  }
  for (std::size_t again = 1; again < inside; ++again) {
    const Open::Entry& other = open[open.size() - inside + again];
    if (source == WorkSource::kCupti) activity::enter(other.id);
    activity::show(other.label.c_str());
  }
}

}  // namespace xpuruntime

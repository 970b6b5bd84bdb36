// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/event.h"

#include <atomic>
#include <chrono>

#include "streams/stream_calls.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

constexpr std::int64_t kNotRecorded = -1;

std::int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

struct Event::Box {
  DeviceId device;
  bool timing = false;
  calls::EventHandle handle = 0;
  std::atomic<std::int64_t> recorded_ns = kNotRecorded;  // On the CPU only.

  ~Box() {
    if (handle != 0) calls::destroy_event(device.index, handle);
  }
};

Event::Event(DeviceId device, bool timing) : box_(std::make_shared<Box>()) {
  box_->device = device;
  box_->timing = timing;
  if (device.type == DeviceType::kCuda) {
    DeviceManager::instance().require(device);
    box_->handle = calls::create_event(device.index, timing);
  }
}

DeviceId Event::device() const noexcept { return box_->device; }
bool Event::timing() const noexcept { return box_->timing; }
std::uintptr_t Event::handle() const noexcept { return box_->handle; }

void Event::record(const Stream& stream) const {
  if (stream.device() != box_->device) {
    throw InputError("an event of " + to_string(box_->device) +
                         " cannot be recorded on a stream of " + to_string(stream.device()) +
                         ": create the event on the stream's device",
                     to_string(box_->device));
  }
  if (box_->device.type == DeviceType::kCpu) {
    box_->recorded_ns = now_ns();
  } else {
    calls::record_event(box_->device.index, box_->handle, stream.handle());
  }
}

void Event::synchronize() const {
  if (box_->device.type == DeviceType::kCuda)
    calls::synchronize_event(box_->device.index, box_->handle);
}

bool Event::query() const {
  return box_->device.type == DeviceType::kCpu ||
         calls::query_event(box_->device.index, box_->handle);
}

double Event::elapsed_us(const Event& start, const Event& end) {
  const DeviceId device = start.device();
  if (!start.timing() || !end.timing()) {
    throw InputError("the time between two events of " + to_string(device) +
                         " is not known, because the " + (start.timing() ? "end" : "start") +
                         " event was made without timing: create both with timing=True",
                     to_string(device));
  }
  if (end.device() != device) {
    throw InputError(
        "the time between an event of " + to_string(device) + " and one of " +
            to_string(end.device()) +
            " is not known, because devices do not share a clock: record both on one device",
        to_string(device));
  }
  if (device.type == DeviceType::kCuda) {
    return calls::elapsed_us(device.index, start.handle(), end.handle());
  }
  const std::int64_t first = start.box_->recorded_ns;
  const std::int64_t last = end.box_->recorded_ns;
  if (first == kNotRecorded || last == kNotRecorded) {
    throw InputError(
        "the time between two events on cpu is not known: record both on a stream first", "cpu");
  }
  return static_cast<double>(last - first) / 1000.0;
}

}  // namespace xpuruntime

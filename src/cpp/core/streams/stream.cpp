// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/stream.h"

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "streams/stream_calls.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/error.h"
#include "xpuruntime/event.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime {

struct Stream::Box {
  DeviceId device;
  StreamHandle handle = 0;
  bool owned = false;
  StreamOptions options;
  std::shared_ptr<void> owner;
  // Recorded anew by each `wait_stream`: making an event costs as much as recording it.
  mutable std::mutex mark_mutex;
  mutable calls::EventHandle mark = 0;

  ~Box() {
    if (mark != 0) calls::destroy_event(device.index, mark);
    if (!owned || device.type == DeviceType::kCpu) return;
    Dispatcher::instance().workspaces().retire_stream(device, handle);
    MemoryManager::instance().retire_stream(device, handle);
    calls::destroy_stream(device.index, handle);
  }
};

Stream Stream::create(DeviceId device, StreamOptions options) {
  const PriorityRange range = priority_range(device);
  if (options.priority > range.least || options.priority < range.greatest) {
    throw InputError("stream priority " + std::to_string(options.priority) +
                         " is out of range on " + to_string(device) + ": choose from " +
                         std::to_string(range.greatest) + " (highest) to " +
                         std::to_string(range.least) + " (lowest)",
                     to_string(device));
  }
  auto box = std::make_shared<Box>();
  box->device = device;
  box->options = options;
  if (device.type == DeviceType::kCuda) {
    box->handle = calls::create_stream(device.index, options.priority, options.non_blocking);
  }
  box->owned = true;
  if (device.type == DeviceType::kCuda) MemoryManager::instance().adopt_stream(device, box->handle);
  return Stream(std::move(box));
}

Stream Stream::wrap(DeviceId device, StreamHandle handle, std::shared_ptr<void> owner) {
  if (device.type == DeviceType::kCuda) {
    DeviceManager::instance().require(device);
  } else if (handle != 0) {
    throw InputError(
        "stream handle " + std::to_string(handle) +
            " cannot be on the CPU, where the only handle is 0: name the CUDA device it is on",
        "cpu");
  }
  auto box = std::make_shared<Box>();
  box->device = device;
  box->handle = handle;
  box->owner = std::move(owner);
  return Stream(std::move(box));
}

PriorityRange Stream::priority_range(DeviceId device) {
  if (device.type == DeviceType::kCpu) return {};
  DeviceManager::instance().require(device);
  return calls::priority_range(device.index);
}

DeviceId Stream::device() const noexcept { return box_->device; }
StreamHandle Stream::handle() const noexcept { return box_->handle; }
bool Stream::owned() const noexcept { return box_->owned; }

int Stream::priority() const {
  if (box_->owned || box_->device.type == DeviceType::kCpu) return box_->options.priority;
  return calls::stream_priority(box_->device.index, box_->handle);
}

bool Stream::non_blocking() const {
  if (box_->owned || box_->device.type == DeviceType::kCpu) return box_->options.non_blocking;
  return calls::stream_non_blocking(box_->device.index, box_->handle);
}

bool Stream::capturing() const {
  return box_->device.type == DeviceType::kCuda &&
         calls::stream_capturing(box_->device.index, box_->handle);
}

void Stream::abort_capture() const noexcept {
  if (box_->device.type == DeviceType::kCuda)
    calls::abort_capture(box_->device.index, box_->handle);
}

void Stream::synchronize() const {
  if (box_->device.type == DeviceType::kCuda)
    calls::synchronize_stream(box_->device.index, box_->handle);
}

bool Stream::query() const {
  return box_->device.type == DeviceType::kCpu ||
         calls::query_stream(box_->device.index, box_->handle);
}

void Stream::wait_event(const Event& event) const {
  if (event.device().type == DeviceType::kCpu) return;
  if (box_->device.type == DeviceType::kCpu) {
    throw UnsupportedOperationError("a CPU stream cannot wait for an event of " +
                                        to_string(event.device()) +
                                        " without blocking the caller: call event.synchronize()",
                                    "cpu");
  }
  calls::wait_event(box_->device.index, box_->handle, event.handle());
}

void Stream::wait_stream(const Stream& other) const {
  if (*this == other || other.device().type == DeviceType::kCpu) return;
  if (box_->device.type == DeviceType::kCpu) {
    throw UnsupportedOperationError("a CPU stream cannot wait for a stream of " +
                                        to_string(other.device()) +
                                        " without blocking the caller: call stream.synchronize()",
                                    "cpu");
  }
  const Box& source = *other.box_;
  const std::lock_guard lock(source.mark_mutex);
  if (source.mark == 0) source.mark = calls::create_event(source.device.index, false);
  calls::record_event(source.device.index, source.mark, source.handle);
  calls::wait_event(box_->device.index, box_->handle, source.mark);
}

Event Stream::record(bool timing) const {
  Event event(box_->device, timing);
  event.record(*this);
  return event;
}

void require_stream_of(DeviceId device, const Stream& stream) {
  if (stream.device() == device) return;
  throw InputError("this work is done by " + to_string(device) + ", and the stream is one of " +
                       to_string(stream.device()) + ": pass a stream of " + to_string(device),
                   to_string(device));
}

}  // namespace xpuruntime

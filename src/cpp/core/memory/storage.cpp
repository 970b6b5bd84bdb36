// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/storage.h"

#include <algorithm>
#include <utility>

#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

Storage::Storage(Buffer buffer, std::optional<Stream> home)
    : buffer_(std::move(buffer)), home_(std::move(home)) {}

Storage::~Storage() {
  buffer_.reset();  // Before the streams that still use it are let go.
  if (release_ != nullptr) release_(context_);
}

void Storage::on_release(void* context, Release release) noexcept {
  context_ = context;
  release_ = release;
}

void Storage::ready_after(const Stream& stream) {
  if (stream.device().type == DeviceType::kCpu) return;
  std::optional<Stream> next(stream);
  std::optional<Event> event;
  if (!stream.capturing()) event = stream.record();
  exchange(next, event);
}

void Storage::ready_in_order_of(const Stream& stream) {
  if (stream.device().type == DeviceType::kCpu) return;
  std::optional<Stream> next(stream);
  std::optional<Event> event;
  exchange(next, event);
}

// What was there before is let go of by the caller, after the lock: a stream's owner may run code
// of its own.
void Storage::exchange(std::optional<Stream>& stream, std::optional<Event>& event) noexcept {
  const std::scoped_lock lock(mutex_);
  stream_.swap(stream);
  event_.swap(event);
}

Event Storage::event_locked() const { return event_ ? *event_ : stream_->record(); }

void Storage::make_wait(const Stream& consumer) {
  const std::scoped_lock lock(mutex_);
  if (!stream_ || *stream_ == consumer) return;
  if (consumer.capturing() && !stream_->capturing()) {
    throw InputError(
        "work on memory that another stream makes ready cannot be captured into a graph, as it "
        "would wait for something "
        "outside of the graph: call order_on(stream) on the tensor, or name the stream where it is "
        "made, before the "
        "capture begins",
        to_string(consumer.device()));
  }
  consumer.wait_event(event_locked());
}

std::optional<Event> Storage::ready_event() {
  const std::scoped_lock lock(mutex_);
  if (!stream_) return std::nullopt;
  return event_locked();
}

std::optional<Stream> Storage::ready_stream() const {
  const std::scoped_lock lock(mutex_);
  return stream_;
}

void Storage::used_by(const Stream& stream) {
  const std::scoped_lock lock(mutex_);
  if (!buffer_ || stream.device().type == DeviceType::kCpu) return;
  if (home_ && *home_ == stream) return;
  if (home_ && home_->device() != stream.device()) {
    // The pool marks streams of its own device only: let the memory's own stream wait instead.
    home_->wait_stream(stream);
    return;
  }
  if (std::find(users_.begin(), users_.end(), stream) != users_.end()) return;
  users_.push_back(stream);
  buffer_.record_stream(stream.handle());
}

bool Storage::release_may_wait() const noexcept {
  const auto& pool = buffer_.pool();
  return pool != nullptr && pool->free_may_wait();
}

}  // namespace xpuruntime

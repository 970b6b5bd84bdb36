// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "xpuruntime/buffer.h"
#include "xpuruntime/event.h"
#include "xpuruntime/stream.h"

namespace xpuruntime {

/// What keeps the bytes of a tensor alive, and the point in a stream's work from which on they may
/// be read. Shared by all tensors on the same bytes.
///
/// Threads: every member may be called from any thread. Nothing blocks. Errors: CudaError.
class Storage {
 public:
  using Release = void (*)(void* context) noexcept;

  /// Bytes that are someone else's.
  Storage() noexcept = default;
  /// Bytes of a pool, given for use in the order of `home`; nothing where no device works on them.
  Storage(Buffer buffer, std::optional<Stream> home);
  /// Gives the bytes back, in stream order.
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// Calls `release(context)` once, when the storage is destroyed, on whichever thread that is.
  /// Called at most once.
  void on_release(void* context, Release release) noexcept;

  /// Readable after the work given to `stream` so far. While the stream is being captured nothing
  /// has run yet: then readable after the work that was given to it when somebody asks.
  void ready_after(const Stream& stream);
  /// Readable after the work that was given to `stream` when somebody asks. Costs nothing.
  void ready_in_order_of(const Stream& stream);
  /// Later work on `consumer` starts when the bytes are readable. Does nothing when they are ready
  /// on that stream.
  /// Throws InputError when only the consumer is being captured into a graph: such a graph could
  /// not be replayed.
  void make_wait(const Stream& consumer);
  /// Nothing when no device works on the bytes.
  std::optional<Event> ready_event();
  /// The stream in whose order they become readable.
  std::optional<Stream> ready_stream() const;

  /// Work on `stream` uses the bytes: they are not used for anything else before it is done. Called
  /// after the work was given to the stream. Without effect on foreign bytes: their owner must be
  /// kept for as long.
  void used_by(const Stream& stream);
  /// Whether giving the bytes back may block.
  bool release_may_wait() const noexcept;

 private:
  Event event_locked() const;
  void exchange(std::optional<Stream>& stream, std::optional<Event>& event) noexcept;

  mutable std::mutex mutex_;
  void* context_ = nullptr;
  Release release_ = nullptr;
  Buffer buffer_;
  std::optional<Stream> home_;
  std::optional<Stream> stream_;
  std::optional<Event> event_;
  std::vector<Stream> users_;
};

}  // namespace xpuruntime

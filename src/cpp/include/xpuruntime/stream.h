// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

#include "xpuruntime/types.h"

namespace xpuruntime {

class Event;

/// CUDA's numbers: a smaller number is a higher priority, so `greatest` <= `least`. (0, 0) on the
/// CPU.
struct PriorityRange {
  int least = 0;
  int greatest = 0;
};

struct StreamOptions {
  int priority = 0;
  /// Whether work on it is independent of the legacy default stream.
  bool non_blocking = true;
};

/// An in-order queue of work on one device.
///
/// A value that shares its stream: copies are the same stream, and it is destroyed with the last
/// copy. Destroying a stream waits for nothing: work that is still queued finishes by itself.
///
/// On the CPU each piece of work is done when the call that asked for it returns, so a CPU stream
/// is always complete.
///
/// Threads: every member may be called from any thread. No member but `synchronize` blocks. The
/// caller's current CUDA device is restored. Errors: CudaError, or UnsupportedOperationError in a
/// build without CUDA.
class Stream {
 public:
  /// Throws InputError when the priority is outside `priority_range(device)`: CUDA would clamp it
  /// silently.
  static Stream create(DeviceId device, StreamOptions options = {});

  /// A stream that someone else owns: it is never destroyed here. `owner`, when given, is kept as
  /// long as the stream is in use. The handles 0 and 1 are the legacy default stream, 2 the
  /// per-thread default stream.
  static Stream wrap(DeviceId device, StreamHandle handle, std::shared_ptr<void> owner = nullptr);

  static PriorityRange priority_range(DeviceId device);

  DeviceId device() const noexcept;
  /// 0 on the CPU.
  StreamHandle handle() const noexcept;
  /// Whether this library made the stream and will destroy it.
  bool owned() const noexcept;
  int priority() const;
  bool non_blocking() const;
  /// Whether work given to it is being recorded into a graph.
  bool capturing() const;
  /// Ends a capture that somebody began on this stream and left open, such as an engine that failed
  /// in it, and drops what was recorded; nothing without one. To be called on the thread that began
  /// it.
  void abort_capture() const noexcept;

  /// Blocks until all work given so far is done. Throws what that work failed with.
  void synchronize() const;
  /// Whether all work given so far is done.
  bool query() const;
  /// Later work on this stream starts after `event`. An event that was never recorded is complete.
  /// A CPU stream takes only CPU events: waiting for a device there would block the caller
  /// (UnsupportedOperationError says so).
  void wait_event(const Event& event) const;
  /// Later work on this stream starts after all work given to `other` so far.
  void wait_stream(const Stream& other) const;
  /// A new event, recorded here. With `timing` it can be given to `elapsed_us`.
  Event record(bool timing = false) const;

  /// The same device and handle.
  friend bool operator==(const Stream& left, const Stream& right) noexcept {
    return left.device() == right.device() && left.handle() == right.handle();
  }

 private:
  struct Box;
  explicit Stream(std::shared_ptr<const Box> box) noexcept : box_(std::move(box)) {}
  std::shared_ptr<const Box> box_;
};

/// Throws InputError when `stream` is on another device than the one that does the work.
void require_stream_of(DeviceId device, const Stream& stream);

}  // namespace xpuruntime

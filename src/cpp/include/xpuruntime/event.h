// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <memory>

#include "xpuruntime/stream.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// A point in a stream's work. On the CPU, the time at which it was recorded.
///
/// A value that shares its event: copies are the same event, and it is destroyed with the last
/// copy.
///
/// Threads: every member may be called from any thread. Only `synchronize` blocks. Errors:
/// CudaError, UnsupportedOperationError in a build without CUDA.
class Event {
 public:
  /// An event that is not recorded yet, which counts as complete. Timed events cost more to record.
  explicit Event(DeviceId device, bool timing = false);

  DeviceId device() const noexcept;
  bool timing() const noexcept;
  /// The `cudaEvent_t` as an integer, 0 on the CPU.
  std::uintptr_t handle() const noexcept;

  /// Moves the event to the end of the work given to `stream` so far. Throws InputError when the
  /// stream is on another device.
  void record(const Stream& stream) const;
  /// Blocks until the work before the event is done.
  void synchronize() const;
  /// Whether the work before the event is done.
  bool query() const;

  /// Microseconds from `start` to `end`, with CUDA's resolution of about half a microsecond. Throws
  /// InputError when one of them was made without timing, is not recorded, is not complete, or when
  /// they are on different devices.
  static double elapsed_us(const Event& start, const Event& end);

 private:
  struct Box;
  std::shared_ptr<Box> box_;
};

}  // namespace xpuruntime

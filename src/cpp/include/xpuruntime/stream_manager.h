// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "xpuruntime/stream.h"

namespace xpuruntime {

/// The streams that parts of a program share. An ordinary object; `instance()` is the process's
/// default one.
///
/// Threads: every member may be called from any thread. Errors: as in Stream.
class StreamManager {
 public:
  /// Streams kept for each device and priority.
  static constexpr std::size_t kPoolSize = 8;

  /// Lives until the process ends and is never destroyed, so it may be used in destructors.
  static StreamManager& instance();

  /// A stream of the caller's own.
  Stream create(DeviceId device, StreamOptions options = {}) const;
  /// The device's legacy default stream. On the CPU, the one stream there is.
  Stream default_stream(DeviceId device);
  /// One of `kPoolSize` shared non-blocking streams of that device and priority, in turn; made on
  /// first use. Two users may get the same stream, which costs them parallelism and nothing else.
  Stream pooled(DeviceId device, int priority = 0);
  PriorityRange priority_range(DeviceId device) const;

 private:
  struct Pool {
    std::vector<Stream> streams;
    std::size_t next = 0;
  };
  std::mutex mutex_;
  std::map<std::tuple<DeviceType, int>, Stream> defaults_;
  std::map<std::tuple<DeviceType, int, int>, Pool> pools_;
};

}  // namespace xpuruntime

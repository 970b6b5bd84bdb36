// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "streams/stream_calls.h"
#include "xpuruntime/profiler.h"

namespace xpuruntime {

/// Times pieces of a stream's work by a pair of CUDA events each: the way without a tracing
/// interface. Thread-safe.
class EventTiming {
 public:
  EventTiming() = default;
  ~EventTiming();
  EventTiming(const EventTiming&) = delete;
  EventTiming& operator=(const EventTiming&) = delete;

  /// Records the first event. Nothing when the stream is being captured, the limit is reached, or
  /// CUDA refuses, which then counts as lost.
  std::optional<std::size_t> begin(std::uint64_t range, std::string name, int device,
                                   StreamHandle stream) noexcept;
  /// Records the second.
  void end(std::size_t piece) noexcept;

  /// Waits for all of them and gives their times, by the host's clock.
  std::vector<WorkRecord> take();
  std::uint64_t lost() const;
  void set_limit(std::size_t limit) { limit_ = limit; }

 private:
  struct Piece {
    std::uint64_t range = 0;
    std::string name;
    int device = 0;
    StreamHandle stream = 0;
    calls::EventHandle start = 0, end = 0;
    bool ended = false;
  };
  /// An event of a device, and the time of the host at which it was reached.
  struct Anchor {
    calls::EventHandle event = 0;
    std::int64_t at_ns = 0;
  };
  void anchor(int device);

  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;
  std::map<int, Anchor> anchors_;
  std::size_t limit_ = Profiler::kDefaultLimit;
  std::uint64_t lost_ = 0;
};

}  // namespace xpuruntime

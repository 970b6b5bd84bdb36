// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "xpuruntime/types.h"

namespace xpuruntime::ort {

/// The streams that the operator of a node was given. They are ONNX Runtime's, which destroys them
/// with its session and reports it nowhere; so when the last operator that used a stream is gone,
/// the scratch memory that was kept for it goes back to the pool. The stream itself is not touched.
/// Thread-safe.
class StreamUse {
 public:
  explicit StreamUse(DeviceId device) noexcept : device_(device) {}
  ~StreamUse();
  StreamUse(const StreamUse&) = delete;
  StreamUse& operator=(const StreamUse&) = delete;

  void note(StreamHandle stream) {
    if (stream != last_.load(std::memory_order_relaxed)) remember(stream);
  }

 private:
  static constexpr StreamHandle kNone = ~StreamHandle{0};
  void remember(StreamHandle stream);

  const DeviceId device_;
  std::atomic<StreamHandle> last_{kNone};
  std::mutex mutex_;
  std::vector<StreamHandle> seen_;
};

}  // namespace xpuruntime::ort

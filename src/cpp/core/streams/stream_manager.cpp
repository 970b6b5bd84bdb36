// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/stream_manager.h"

#include "xpuruntime/runtime.h"

namespace xpuruntime {

StreamManager& StreamManager::instance() { return Runtime::instance().streams(); }

Stream StreamManager::create(DeviceId device, StreamOptions options) const {
  return Stream::create(device, options);
}

Stream StreamManager::default_stream(DeviceId device) {
  const std::scoped_lock lock(mutex_);
  const std::tuple key{device.type, device.index};
  const auto found = defaults_.find(key);
  if (found != defaults_.end()) return found->second;
  return defaults_.emplace(key, Stream::wrap(device, 0)).first->second;
}

Stream StreamManager::pooled(DeviceId device, int priority) {
  const std::scoped_lock lock(mutex_);
  const std::tuple key{device.type, device.index, priority};
  const auto found = pools_.find(key);
  const std::size_t made = found == pools_.end() ? 0 : found->second.streams.size();
  if (made < kPoolSize) {
    Stream stream = Stream::create(device, {.priority = priority, .non_blocking = true});
    pools_[key].streams.push_back(stream);
    return stream;
  }
  Pool& pool = found->second;
  const Stream stream = pool.streams[pool.next];
  pool.next = (pool.next + 1) % kPoolSize;
  return stream;
}

PriorityRange StreamManager::priority_range(DeviceId device) const {
  return Stream::priority_range(device);
}

}  // namespace xpuruntime

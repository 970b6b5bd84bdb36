// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/memory_manager.h"

#include <algorithm>
#include <string>
#include <utility>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"
#include "xpuruntime/runtime.h"

namespace xpuruntime {
namespace {

int key_of(DeviceId device) { return device.type == DeviceType::kCpu ? -1 : device.index; }

[[noreturn]] void refuse_kind(DeviceId device, std::string_view kind) {
  const std::string quoted = "'" + std::string(kind) + "'";
  if (kind == "driver") {
    throw UnsupportedOperationError(
        "a pool of kind 'driver' is the CUDA driver's own and does not exist on 'cpu': take "
        "'direct' or "
        "'caching'",
        to_string(device));
  }
  if (kind == "pinned") {
    const std::string& reason = DeviceManager::instance().cuda_reason();
    throw UnsupportedOperationError(
        "a pool of kind 'pinned' serves copies to and from a CUDA device: " +
            (reason.empty() ? std::string("name that device, such as 'cuda:0', instead of 'cpu'")
                            : "there is none here. Fix: take 'direct' or 'caching'"),
        to_string(device));
  }
  throw InputError(
      "pool kind " + quoted + " is not known: take 'direct', 'caching', 'driver' or 'pinned'",
      to_string(device));
}

std::shared_ptr<MemoryPool> build(DeviceId device, std::string_view kind, PoolOptions options) {
  const bool cuda = device.type == DeviceType::kCuda;
  if (kind == "direct") {
    return make_plain_pool("direct",
                           cuda ? make_device_resource(device.index) : make_host_resource(),
                           std::move(options));
  }
  if (kind == "caching") {
    return make_caching_pool("caching",
                             cuda ? make_device_resource(device.index) : make_host_resource(),
                             std::move(options));
  }
  if (cuda && kind == "driver") {
    return make_plain_pool("driver", make_driver_resource(device.index), std::move(options));
  }
  if (cuda && kind == "pinned") {
    return make_caching_pool("pinned", make_pinned_resource(device.index), std::move(options));
  }
  refuse_kind(device, kind);
}

}  // namespace

MemoryManager& MemoryManager::instance() { return Runtime::instance().memory(); }

std::shared_ptr<MemoryPool> MemoryManager::make_pool(DeviceId device, std::string_view kind,
                                                     PoolOptions options) {
  DeviceManager::instance().require(device);
  std::shared_ptr<MemoryPool> pool = build(device, kind, std::move(options));
  const std::lock_guard lock(mutex_);
  const auto streams = streams_.find(key_of(device));
  if (streams != streams_.end()) {
    for (const StreamHandle stream : streams->second) pool->adopt_stream(stream);
  }
  std::erase_if(pools_, [](const auto& weak) { return weak.expired(); });
  pools_.push_back(pool);
  return pool;
}

std::shared_ptr<MemoryPool> MemoryManager::default_pool(DeviceId device) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = defaults_.find(key_of(device));
    if (found != defaults_.end()) return found->second;
  }
  std::shared_ptr<MemoryPool> pool =
      make_pool(device, "caching", {.name = "default@" + to_string(device), .limit = {}});
  const std::lock_guard lock(mutex_);
  return defaults_.try_emplace(key_of(device), std::move(pool)).first->second;
}

std::vector<std::shared_ptr<MemoryPool>> MemoryManager::pools(
    std::optional<DeviceId> device) const {
  std::vector<std::shared_ptr<MemoryPool>> live;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : pools_) {
    std::shared_ptr<MemoryPool> pool = weak.lock();
    if (pool != nullptr && (!device || pool->device() == *device)) live.push_back(std::move(pool));
  }
  return live;
}

std::size_t MemoryManager::get_allocated_size(std::optional<DeviceId> device) const {
  return get_stats(device).current;
}

MemoryStats MemoryManager::get_stats(std::optional<DeviceId> device) const {
  MemoryStats sum;
  for (const auto& pool : pools(device)) {
    const MemoryStats one = pool->stats();
    sum.requested += one.requested;
    sum.current += one.current;
    sum.peak += one.peak;
    sum.reserved += one.reserved;
    sum.peak_reserved += one.peak_reserved;
    sum.cached += one.cached;
    sum.pending += one.pending;
    sum.largest_free = std::max(sum.largest_free, one.largest_free);
    sum.allocations += one.allocations;
    sum.total_allocations += one.total_allocations;
    sum.upstream_allocations += one.upstream_allocations;
    sum.failures += one.failures;
  }
  return sum;
}

std::size_t MemoryManager::empty_cache(std::optional<DeviceId> device) {
  std::size_t released = 0;
  for (const auto& pool : pools(device)) released += pool->empty_cache();
  return released;
}

void MemoryManager::adopt_stream(DeviceId device, StreamHandle stream) {
  if (device.type != DeviceType::kCuda) return;
  {
    const std::lock_guard lock(mutex_);
    streams_[device.index].insert(stream);
  }
  for (const auto& pool : pools(device)) pool->adopt_stream(stream);
}

void MemoryManager::retire_stream(DeviceId device, StreamHandle stream) noexcept {
  if (device.type != DeviceType::kCuda) return;
  std::unique_lock lock(mutex_);
  const auto streams = streams_.find(device.index);
  if (streams != streams_.end()) streams->second.erase(stream);
  // One pool at a time and without a copy of the list, which could fail. Pools are only ever added
  // at the end.
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const std::shared_ptr<MemoryPool> pool = pools_[i].lock();
    if (pool != nullptr && pool->device() == device) pool->retire_stream(stream);
  }
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/memory_pool.h"

#include <cstdio>
#include <string>
#include <utility>

#include "streams/stream_handle.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

std::string readable(std::size_t bytes) {
  constexpr const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(units)) {
    value /= 1024.0;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", value, units[unit]);
  return text;
}

}  // namespace

MemoryPool::MemoryPool(std::string_view kind, std::unique_ptr<MemoryResource> resource,
                       PoolOptions options)
    : name_(options.name.empty() ? std::string(kind) + "@" + to_string(resource->device())
                                 : std::move(options.name)),
      kind_(kind),
      resource_(std::move(resource)) {}

Buffer MemoryPool::allocate(std::size_t bytes, StreamHandle stream) {
  stream = checked_stream(stream);
  std::shared_ptr<MemoryPool> self = shared_from_this();
  Block* block = take(bytes, stream);
  return {std::move(self), block};
}

Buffer MemoryPool::try_allocate(std::size_t bytes, StreamHandle stream) noexcept {
  if (stream == kPerThreadStream) return {};
  Block* block = try_take(bytes, stream == kLegacyStream ? 0 : stream);
  if (block == nullptr) return {};
  return {weak_from_this().lock(), block};
}

void MemoryPool::throw_out_of_memory(std::size_t bytes, const MemoryStats& stats,
                                     std::optional<std::size_t> limit) const {
  const MemoryInfo info = resource_->memory_info();
  const std::string on = to_string(device());
  std::string text = "pool '" + name_ + "' on " + on + " cannot give " + readable(bytes) + ": " +
                     readable(stats.current) + " in use, " + readable(stats.cached) + " cached, " +
                     (limit ? "limit " + readable(*limit) : std::string("no limit"));
  if (info.total != 0) {
    text += "; " + std::string(host_accessible() ? "the host" : on) + " has " +
            readable(info.free) + " free of " + readable(info.total);
  }
  text += limit ? ". Free buffers, raise the limit, or ask for less"
                : ". Free buffers, or ask for less";
  throw OutOfMemoryError(text, on, bytes);
}

}  // namespace xpuruntime

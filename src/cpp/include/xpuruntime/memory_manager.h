// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

/// Makes pools and knows the live ones, so that "who holds what" has an answer. Owns none of them,
/// except the default pool of a device once it was asked for. Thread-safe.
class MemoryManager {
 public:
  static MemoryManager& instance();

  /// `kind`: "direct", "caching", "driver" or "pinned". On `cpu` the first two exist. Throws
  /// InputError for an unknown kind, UnsupportedOperationError for one that the device or build has
  /// not, CudaError when the device is not there. An empty name becomes "<kind>@<device>".
  std::shared_ptr<MemoryPool> make_pool(DeviceId device, std::string_view kind,
                                        PoolOptions options = {});
  /// The device's shared caching pool, without a limit; made when first asked for.
  std::shared_ptr<MemoryPool> default_pool(DeviceId device);

  /// Live pools in the order they were made; of one device, or all.
  std::vector<std::shared_ptr<MemoryPool>> pools(
      std::optional<DeviceId> device = std::nullopt) const;
  /// Bytes in use (`current`), over live pools.
  std::size_t get_allocated_size(std::optional<DeviceId> device = std::nullopt) const;
  /// Sums over live pools; `largest_free` is the largest.
  MemoryStats get_stats(std::optional<DeviceId> device = std::nullopt) const;
  /// Empties the cache of every live pool. Returns the bytes given back.
  std::size_t empty_cache(std::optional<DeviceId> device = std::nullopt);

  /// A stream's maker calls these after making and before destroying it; see
  /// MemoryPool::retire_stream.
  void adopt_stream(DeviceId device, StreamHandle stream);
  void retire_stream(DeviceId device, StreamHandle stream) noexcept;

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::weak_ptr<MemoryPool>> pools_;
  std::unordered_map<int, std::unordered_set<StreamHandle>> streams_;  // by CUDA device
  std::unordered_map<int, std::shared_ptr<MemoryPool>> defaults_;      // CPU is -1
};

}  // namespace xpuruntime

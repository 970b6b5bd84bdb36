// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

/// Number of different torch allocators that can exist at the same time in one process.
inline constexpr std::size_t kTorchAllocatorSlots = 64;

struct TorchAllocatorStats {
  std::size_t current = 0;  ///< bytes that PyTorch asked for and has not freed
  std::size_t peak = 0;
  std::size_t in_graphs = 0;            ///< bytes that PyTorch freed and a graph still may write
  std::uint64_t allocations = 0;        ///< live
  std::uint64_t total_allocations = 0;  ///< ever
  std::uint64_t failures = 0;           ///< allocations that were refused
  std::uint64_t foreign_frees = 0;      ///< frees of addresses it never gave; ignored
};

/// The functions of a `torch.cuda.memory.CUDAPluggableAllocator`, over xpuruntime pools, one for
/// each device. They get no user data, so each different set of pools occupies one of
/// kTorchAllocatorSlots slots with functions of its own; objects over the same pools share a slot
/// and its numbers.
///
/// Memory is given in the order of the stream that PyTorch names, and taken back in the same
/// order; other streams are declared through `record_stream_address`. The functions may be called
/// from any thread, with or without the GIL, and keep their pools alive.
///
/// Graph capture: what is allocated on a stream that is being captured is held until the graph and
/// all that was instantiated from it are gone and have run, and until PyTorch has freed it; while
/// that capture lasts, what it frees it may use again. A pool of kind "driver" is refused there.
///
/// The destructor of the last object of a slot closes it. PyTorch may outlive it: a closed slot
/// refuses allocations, accepts frees, and is used again only after the last of them.
class TorchAllocator {
 public:
  /// What PyTorch expects of a failed allocation.
  enum class Failing {
    kNull,   ///< nullptr: PyTorch's caching allocator is above us and raises its own error
    kThrow,  ///< the error is thrown: nothing is above us, and nullptr would become a tensor
  };

  /// At most one pool a device. Throws InputError for none, a null one, two of one device, or one
  /// of host memory; UnsupportedOperationError when all slots are taken.
  TorchAllocator(std::vector<std::shared_ptr<MemoryPool>> pools, Failing failing);
  ~TorchAllocator();
  TorchAllocator(const TorchAllocator&) = delete;
  TorchAllocator& operator=(const TorchAllocator&) = delete;

  /// Addresses of `void* (size_t, int device, cudaStream_t)`,
  /// `void (void*, size_t, int device, cudaStream_t)`, `void (void*, cudaStream_t)`, `void ()` and
  /// `void (double fraction, int device)`.
  std::uintptr_t alloc_address() const noexcept;
  std::uintptr_t free_address() const noexcept;
  std::uintptr_t record_stream_address() const noexcept;
  std::uintptr_t empty_cache_address() const noexcept;
  std::uintptr_t memory_fraction_address() const noexcept;

  /// Which slot it has, from 0.
  std::size_t slot() const noexcept { return slot_; }
  const std::vector<std::shared_ptr<MemoryPool>>& pools() const noexcept { return pools_; }
  Failing failing() const noexcept { return failing_; }
  /// Of all devices, or one.
  TorchAllocatorStats stats(std::optional<int> device = std::nullopt) const;

  /// Reason of the last failed allocation, and its size; empty and 0 if none failed since the last
  /// call. Clears it.
  struct Failure {
    std::string reason;
    std::string device;
    std::size_t requested = 0;
  };
  Failure take_failure();

  /// Slots free now.
  static std::size_t available();

 private:
  std::vector<std::shared_ptr<MemoryPool>> pools_;
  Failing failing_;
  std::size_t slot_;
};

}  // namespace xpuruntime

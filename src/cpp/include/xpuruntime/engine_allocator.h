// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

/// Number of engine allocators that can exist at the same time in one process.
inline constexpr std::size_t kEngineAllocatorSlots = 64;

struct EngineAllocatorStats {
  std::size_t current = 0;  ///< bytes the engine asked for and has not freed
  std::size_t peak = 0;
  std::uint64_t allocations = 0;        ///< live
  std::uint64_t total_allocations = 0;  ///< ever
  std::uint64_t failures = 0;           ///< times nullptr was the answer
  std::uint64_t foreign_frees = 0;  ///< frees of addresses that this allocator never gave; ignored
};

/// Lets an engine that takes C allocation functions without user data, such as ONNX Runtime's
/// `gpu_external_alloc`, allocate from a pool. Each object occupies one of kEngineAllocatorSlots
/// slots with functions of its own.
///
/// The functions never throw: a failed allocation returns nullptr and leaves its reason in
/// `last_error`. They may be called from any thread. They keep the pool alive; memory is allocated
/// in the order of the given stream.
///
/// The destructor gives the slot back. An engine that outlives it stays safe: the slot then refuses
/// allocations, accepts frees, and is used again only after the last of them.
class EngineAllocator {
 public:
  /// Throws InputError for a null pool, UnsupportedOperationError when all slots are taken.
  explicit EngineAllocator(std::shared_ptr<MemoryPool> pool, StreamHandle stream = 0);
  ~EngineAllocator();
  EngineAllocator(const EngineAllocator&) = delete;
  EngineAllocator& operator=(const EngineAllocator&) = delete;

  /// Addresses of `void* (size_t)`, `void (void*)` and `void ()`.
  std::uintptr_t alloc_address() const noexcept;
  std::uintptr_t free_address() const noexcept;
  std::uintptr_t empty_cache_address() const noexcept;

  EngineAllocatorStats stats() const;
  const std::shared_ptr<MemoryPool>& pool() const noexcept { return pool_; }
  StreamHandle stream() const noexcept { return stream_; }

  /// Reason of the last failed allocation, and its size; empty and 0 if none failed since the last
  /// call. Clears it.
  struct Failure {
    std::string reason;
    std::size_t requested = 0;
  };
  Failure take_failure();

  /// Slots free now.
  static std::size_t available();

 private:
  std::shared_ptr<MemoryPool> pool_;
  StreamHandle stream_;
  std::size_t slot_;
};

}  // namespace xpuruntime

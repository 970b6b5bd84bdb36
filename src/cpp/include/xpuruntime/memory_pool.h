// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "xpuruntime/buffer.h"
#include "xpuruntime/memory_resource.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// Bytes and counts of one pool, or the sum of several. All of one moment.
struct MemoryStats {
  std::size_t requested = 0;  ///< what callers asked for, over live buffers
  std::size_t current =
      0;                 ///< what those buffers occupy after rounding; never less than `requested`
  std::size_t peak = 0;  ///< largest `current` since the pool was made or `reset_peak`
  std::size_t reserved = 0;  ///< held from the device, in use or not; this is what a limit bounds
  std::size_t peak_reserved = 0;
  std::size_t cached = 0;   ///< `reserved` - `current`: held and not in use
  std::size_t pending = 0;  ///< the part of `cached` that waits for work of other streams to finish
  /// Longest run of adjacent free bytes, inside one block from the device, that a single allocation
  /// could get.
  std::size_t largest_free = 0;
  std::uint64_t allocations = 0;           ///< live buffers
  std::uint64_t total_allocations = 0;     ///< buffers ever given
  std::uint64_t upstream_allocations = 0;  ///< times the device was asked (cudaMalloc and the like)
  std::uint64_t failures = 0;              ///< times OutOfMemoryError was the answer

  /// 1 - largest_free / cached: 0 when all cached memory is one run (or nothing is cached), towards
  /// 1 when it lies in many small pieces. Always 0 for pools that cache nothing themselves (direct,
  /// driver).
  double fragmentation() const noexcept {
    return cached == 0 || largest_free >= cached
               ? 0.0
               : 1.0 - static_cast<double>(largest_free) / static_cast<double>(cached);
  }

  friend bool operator==(const MemoryStats&, const MemoryStats&) = default;
};

struct PoolOptions {
  /// Who holds the memory, for reports. Need not be unique.
  std::string name;
  /// Most bytes the pool may hold from the device (`reserved`).
  std::optional<std::size_t> limit;
};

/// A counted, limited source of memory on one device. Always held by shared_ptr; buffers keep it
/// alive.
///
/// Streams: `allocate(n, S)` gives memory for use in the order of S. A block freed on S is used
/// again at once on S, and on another stream only behind an event, so neither reuse nor freeing
/// waits on the host. Handle 1 means 0 (the legacy default stream). Handle 2 (the per-thread
/// default stream) is refused: it names a different stream on every thread, so the order of work
/// cannot be distinguished from it.
///
/// A stream that is destroyed while the pool still has blocks of it must be announced with
/// `retire_stream` before. xpuruntime's own streams do so. For others, either call it, or
/// synchronise the stream before destroying it.
///
/// Graph capture: memory that captured work uses must stay allocated for as long as the graph may
/// be replayed.
///
/// Thread-safe. Errors: OutOfMemoryError (what was asked, in use, cached, limit, free and total on
/// the device), CudaError, InputError (stream 2). After an error the pool works as before.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  virtual ~MemoryPool() = default;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// `bytes` may be 0.
  Buffer allocate(std::size_t bytes, StreamHandle stream = 0);
  /// An empty buffer unless it can be had without waiting for a lock or asking the device.
  Buffer try_allocate(std::size_t bytes, StreamHandle stream = 0) noexcept;

  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() noexcept = 0;
  /// Gives unused memory back to the device until at most `keep` bytes are cached. Returns the
  /// bytes given back.
  virtual std::size_t trim(std::size_t keep) = 0;
  /// Gives all unused memory back. Also gets memory back that waits for a mark which could not be
  /// set; for that it waits for all work of the device.
  virtual std::size_t empty_cache() = 0;

  virtual std::optional<std::size_t> limit() const = 0;
  /// Below what is held: unused memory is given back, and what is in use stays valid.
  virtual void set_limit(std::optional<std::size_t> limit) = 0;

  /// Says that a stream lives until `retire_stream`: its free blocks may be lent to other streams
  /// (behind an event).
  virtual void adopt_stream(StreamHandle stream) = 0;
  /// Says that a stream is about to be destroyed. Its blocks stay valid, and those free go to any
  /// stream after its work.
  virtual void retire_stream(StreamHandle stream) noexcept = 0;

  const std::string& name() const noexcept { return name_; }
  /// "direct", "caching", "driver" or "pinned".
  std::string_view kind() const noexcept { return kind_; }
  /// The device that the memory serves. Memory of a pinned pool is host memory.
  DeviceId device() const noexcept { return resource_->device(); }
  bool host_accessible() const noexcept { return resource_->host_accessible(); }
  /// Whether freeing a buffer may wait on the device (cudaFree does).
  virtual bool free_may_wait() const noexcept = 0;

 protected:
  friend class Buffer;
  MemoryPool(std::string_view kind, std::unique_ptr<MemoryResource> resource, PoolOptions options);

  /// Block or throw; `stream` is checked already.
  virtual Block* take(std::size_t bytes, StreamHandle stream) = 0;
  /// Block, or nullptr when it is not at hand.
  virtual Block* try_take(std::size_t bytes, StreamHandle stream) noexcept = 0;
  virtual void give(Block* block) noexcept = 0;
  virtual void use_on(Block* block, StreamHandle stream) = 0;
  [[noreturn]] void throw_out_of_memory(std::size_t bytes, const MemoryStats& stats,
                                        std::optional<std::size_t> limit) const;

  const std::string name_;
  const std::string_view kind_;
  const std::unique_ptr<MemoryResource> resource_;
};

/// Every allocation goes to the resource, and every free back to it.
std::shared_ptr<MemoryPool> make_plain_pool(std::string_view kind,
                                            std::unique_ptr<MemoryResource> resource,
                                            PoolOptions options);

/// Keeps freed memory for reuse.
///
/// Sizes up to 1 MiB are rounded to 512 bytes and cut from segments of 2 MiB; larger ones to 128
/// KiB, from 16 MiB on to 2 MiB, with segments of their own. A freed block waits in the bin of its
/// size, where the next allocation of that size finds it. When a bin is empty, the free blocks are
/// joined with their free neighbours and the best fit is cut.
///
/// When the device or the limit refuses, in this order: free blocks of other adopted streams,
/// behind an event; unused segments are given back, and the device is asked once more; marks of
/// other streams are waited for, and asked once more; OutOfMemoryError.
///
/// Threads that the cache serves never wait for a thread that takes memory from the resource, gives
/// it back, or waits for events. One thread at a time calls `allocate` and `deallocate` of it.
///
/// Segments are given back while work on streams may still use them, so the resource's `deallocate`
/// must wait for the device, as cudaFree and cudaFreeHost do.
///
/// For host memory that a device reads (pinned), reuse on the same stream is not safe either, as
/// the host writes at once: there every block waits for its own stream's mark.
std::shared_ptr<MemoryPool> make_caching_pool(std::string_view kind,
                                              std::unique_ptr<MemoryResource> resource,
                                              PoolOptions options);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "xpuruntime/types.h"

namespace xpuruntime {

class MemoryManager;

/// Scratch memory for kernels: one block for each device and stream, from the device's default
/// pool, kept and grown.
///
/// Work on one stream runs in order, so its kernels may share one block. A block that is replaced
/// by a larger one goes back to the pool in the order of its stream.
///
/// While a stream is captured into a graph, blocks of that capture's own are given, one for each
/// captured stream, straight from the device: the graph may be replayed on any stream. The graph,
/// and whatever is instantiated or cloned from it, holds them. Soon after the last of these is
/// gone, when CUDA says so, a block is idle: later captures use it again, and what they do not use
/// is given back when another block grows, and by `clear`.
///
/// Thread-safe. Errors: OutOfMemoryError, CudaError, InputError for the per-thread default stream;
/// what was there before stays usable.
class Workspaces {
 public:
  /// A block in use. Two threads that give work to one stream take turns: a kernel may be several
  /// launches, between which nobody else may write the block.
  class Lease {
   public:
    Lease() noexcept = default;
    Lease(Lease&&) noexcept = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease() = default;
    /// Null for 0 bytes.
    void* data() const noexcept { return data_; }

   private:
    friend class Workspaces;
    std::shared_ptr<void> slot_;  // outlives the lock
    std::unique_lock<std::mutex> lock_;
    void* data_ = nullptr;
  };

  explicit Workspaces(MemoryManager& memory);
  ~Workspaces();
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;

  /// At least `bytes`, aligned to 256, for work given to `stream` while the lease is held. On the
  /// CPU the block belongs to the calling thread, until that ends.
  Lease get(DeviceId device, StreamHandle stream, std::size_t bytes);
  /// A stream is about to be destroyed: its block goes back to the pool. Streams of this library
  /// say so themselves.
  void retire_stream(DeviceId device, StreamHandle stream) noexcept;
  /// Bytes held, those of graphs among them.
  std::size_t bytes() const;
  /// Gives everything back that no graph holds and no thread is using.
  void clear();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace xpuruntime

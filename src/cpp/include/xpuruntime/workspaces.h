// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "xpuruntime/types.h"

namespace xpuruntime {

class MemoryManager;

/// Scratch memory for kernels: one block for each device and stream, from the device's default
/// pool, kept and grown.
///
/// Work on one stream runs in order, so its kernels may share one block. A block that is replaced
/// by a larger one goes back to the pool in the order of its stream. While a stream is captured
/// into a graph, blocks of that capture's own are given, and they live as long as the graph does
/// (the graph, and what is instantiated from it, holds them), because it may be replayed on any
/// stream.
///
/// Thread-safe. Errors: OutOfMemoryError, CudaError; what was there before stays usable.
class Workspaces {
 public:
  explicit Workspaces(MemoryManager& memory);
  ~Workspaces();
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;

  /// At least `bytes`, aligned to 256; null for 0. Valid for work given to `stream` before the next
  /// call for that stream. On the CPU the block belongs to the calling thread.
  void* get(DeviceId device, StreamHandle stream, std::size_t bytes);
  /// Bytes held.
  std::size_t bytes() const;
  /// Gives everything back that no graph holds.
  void clear();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace xpuruntime

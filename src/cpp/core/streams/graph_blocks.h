// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <mutex>

#include "streams/stream_calls.h"
#include "xpuruntime/buffer.h"

namespace xpuruntime {

class MemoryManager;

/// Scratch memory that graphs hold. There is one of it in a process and it is never destroyed,
/// because a graph may outlive everything else. Thread-safe.
class GraphBlocks {
 public:
  struct View {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  static GraphBlocks& instance();

  /// At least `bytes`, held by the graph that is being captured: an idle block, or a new one
  /// straight from the device, on which no work can be pending.
  View give(MemoryManager& memory, DeviceId device, const calls::Capture& capture,
            std::size_t bytes);
  /// Gives idle blocks back to the device.
  void release_idle() noexcept;
  std::size_t bytes() const noexcept;

 private:
  struct Block {
    Buffer buffer;
    Block* next = nullptr;
  };
  GraphBlocks() = default;
  static void on_graph_gone(void* block) noexcept;
  Block* take_idle(DeviceId device, std::size_t bytes) noexcept;
  void put_idle(Block* block) noexcept;

  // Never held while CUDA is called: a graph's end may be reported to a thread of CUDA at any time.
  mutable std::mutex mutex_;
  Block* idle_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace xpuruntime

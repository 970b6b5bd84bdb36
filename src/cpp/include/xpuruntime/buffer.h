// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "xpuruntime/types.h"

namespace xpuruntime {

class MemoryPool;
struct Block;

/// One allocation. Owns its block, and keeps its pool alive; freeing happens once, in the
/// destructor, which never throws. Move-only. One buffer is for one thread at a time; different
/// buffers are independent.
///
/// Freeing is in stream order: the memory may be used again at once by later work on the buffer's
/// stream. Work of another stream that still uses the memory must be declared with `record_stream`
/// first, else it is a data race.
class Buffer {
 public:
  Buffer() noexcept = default;
  Buffer(std::shared_ptr<MemoryPool> pool, Block* block) noexcept
      : pool_(std::move(pool)), block_(block) {}
  Buffer(Buffer&& other) noexcept
      : pool_(std::move(other.pool_)), block_(std::exchange(other.block_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      pool_ = std::move(other.pool_);
      block_ = std::exchange(other.block_, nullptr);
    }
    return *this;
  }
  ~Buffer() { reset(); }

  explicit operator bool() const noexcept { return block_ != nullptr; }
  /// Aligned to 256 bytes. Never null for a buffer that a pool gave, even one of 0 bytes.
  void* data() const noexcept;
  /// As asked for; the block behind it may be larger.
  std::size_t size() const noexcept;
  StreamHandle stream() const noexcept;
  /// Null for an empty buffer.
  const std::shared_ptr<MemoryPool>& pool() const noexcept { return pool_; }

  /// Declares that work enqueued (or to be enqueued before the buffer is freed) on `stream` uses
  /// the memory. When the buffer is freed, a mark is set on `stream` and the memory is not used
  /// again before that mark is passed. May throw std::bad_alloc. Without effect on the CPU.
  void record_stream(StreamHandle stream);

  /// Frees now. The buffer is empty afterwards.
  void reset() noexcept;

 private:
  std::shared_ptr<MemoryPool> pool_;
  Block* block_ = nullptr;
};

}  // namespace xpuruntime

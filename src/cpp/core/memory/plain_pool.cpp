// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <utility>

#include "memory/block.h"
#include "streams/stream_handle.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

struct LiveBlock : Block {
  bool unordered = false;  // some work that uses it could not be marked
  LiveBlock* left = nullptr;
  LiveBlock* right = nullptr;
};

void link(LiveBlock* block, LiveBlock*& head) noexcept {
  block->left = nullptr;
  block->right = head;
  if (head != nullptr) head->left = block;
  head = block;
}

void unlink(LiveBlock* block, LiveBlock*& head) noexcept {
  (block->left != nullptr ? block->left->right : head) = block->right;
  if (block->right != nullptr) block->right->left = block->left;
}

class PlainPool final : public MemoryPool {
 public:
  PlainPool(std::string_view kind, std::unique_ptr<MemoryResource> resource, PoolOptions options)
      : MemoryPool(kind, std::move(resource), options),
        order_(resource_->order()),
        limit_(options.limit) {}

  ~PlainPool() override { release_stuck(); }

  MemoryStats stats() const override {
    const std::lock_guard lock(mutex_);
    return snapshot();
  }

  void reset_peak() noexcept override {
    const std::lock_guard lock(mutex_);
    counts_.peak = counts_.current;
    counts_.peak_reserved = reserved();
  }

  std::size_t trim(std::size_t keep) override {
    const std::lock_guard lock(mutex_);
    return shrink(counts_.current + counts_.pending + keep);
  }

  std::size_t empty_cache() override {
    const std::lock_guard lock(mutex_);
    const std::size_t released = release_stuck();
    return released + shrink(counts_.current + counts_.pending);
  }

  std::optional<std::size_t> limit() const override {
    const std::lock_guard lock(mutex_);
    return limit_;
  }

  void set_limit(std::optional<std::size_t> limit) override {
    const std::lock_guard lock(mutex_);
    limit_ = limit;
    if (limit) shrink(std::max(counts_.current + counts_.pending, *limit));
  }

  void adopt_stream(StreamHandle /*stream*/) override {}

  void retire_stream(StreamHandle stream) noexcept override {
    if (order_ == nullptr || stream == 0) return;
    const std::lock_guard lock(mutex_);
    for (LiveBlock* block = live_; block != nullptr; block = block->right) {
      if (block->stream == stream) {
        block->stream = 0;
        block->unordered |= !let_wait(0, stream);
      }
      if (std::erase(block->used_on, stream) > 0) {
        block->unordered |= !let_wait(block->stream, stream);
      }
    }
  }

  bool free_may_wait() const noexcept override { return order_ != nullptr; }

 private:
  Block* take(std::size_t bytes, StreamHandle stream) override {
    auto block = std::make_unique<LiveBlock>();
    block->size = std::max<std::size_t>(bytes, 1);
    block->requested = bytes;
    block->stream = stream;
    reserve(*block);
    try {
      block->pointer = resource_->allocate(block->size, stream);
      if (block->pointer == nullptr) {
        resource_->trim(0);
        block->pointer = resource_->allocate(block->size, stream);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      counts_.current -= block->size;
      throw;
    }
    std::unique_lock lock(mutex_);
    ++counts_.upstream_allocations;
    if (block->pointer == nullptr) {
      counts_.current -= block->size;
      refuse(bytes, lock);
    }
    link(block.get(), live_);
    counts_.requested += bytes;
    counts_.peak = std::max(counts_.peak, counts_.current);
    counts_.peak_reserved = std::max(counts_.peak_reserved, reserved());
    ++counts_.allocations;
    ++counts_.total_allocations;
    return block.release();
  }

  Block* try_take(std::size_t /*bytes*/, StreamHandle /*stream*/) noexcept override {
    return nullptr;
  }

  void give(Block* base) noexcept override {
    auto* const block = static_cast<LiveBlock*>(base);
    {
      const std::lock_guard lock(mutex_);
      unlink(block, live_);
      counts_.requested -= block->requested;
      --counts_.allocations;
      for (const StreamHandle other : block->used_on) {
        block->unordered |= !let_wait(block->stream, other);
      }
      if (block->unordered && !order_->synchronize_all()) {
        link(block, stuck_);
        counts_.current -= block->size;
        counts_.pending += block->size;
        return;
      }
    }
    // Outside of the lock, as cudaFree waits for the device. The bytes count as in use until they
    // are gone.
    resource_->deallocate(block->pointer, block->size, block->stream);
    {
      const std::lock_guard lock(mutex_);
      counts_.current -= block->size;
    }
    delete block;
  }

  void use_on(Block* block, StreamHandle stream) override {
    stream = checked_stream(stream);
    if (order_ == nullptr) return;
    const std::lock_guard lock(mutex_);
    auto& streams = block->used_on;
    if (stream != block->stream &&
        std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }

  // Counts the bytes before they are there, so that threads cannot pass the limit together.
  void reserve(const LiveBlock& block) {
    std::unique_lock lock(mutex_);
    const std::size_t used = counts_.current + counts_.pending;
    if (limit_) {
      if (used > *limit_ || block.size > *limit_ - used) refuse(block.requested, lock);
      if (resource_->held() > *limit_ - block.size) resource_->trim(*limit_ - block.size);
    }
    counts_.current += block.size;
  }

  [[noreturn]] void refuse(std::size_t bytes, std::unique_lock<std::mutex>& lock) {
    ++counts_.failures;
    const MemoryStats now = snapshot();
    const auto limit = limit_;
    lock.unlock();
    throw_out_of_memory(bytes, now, limit);
  }

  // Later work on `stream` waits for what `other` has been given.
  bool let_wait(StreamHandle stream, StreamHandle other) noexcept {
    const StreamOrder::Event event = order_->record(other);
    if (event == 0) return false;
    const bool ordered = order_->wait(stream, event);
    order_->destroy(event);
    return ordered;
  }

  std::size_t release_stuck() noexcept {
    if (stuck_ == nullptr || !order_->synchronize_all()) return 0;
    std::size_t released = 0;
    while (LiveBlock* block = stuck_) {
      unlink(block, stuck_);  // NOLINT(clang-analyzer-cplusplus.NewDelete): moves the head on
      resource_->deallocate(block->pointer, block->size, block->stream);
      released += block->size;
      delete block;
    }
    counts_.pending -= released;
    return released;
  }

  std::size_t shrink(std::size_t keep) noexcept {
    const std::size_t before = resource_->held();
    resource_->trim(keep);
    const std::size_t after = resource_->held();
    return before > after ? before - after : 0;
  }

  std::size_t reserved() const noexcept {
    return std::max(resource_->held(), counts_.current + counts_.pending);
  }

  MemoryStats snapshot() const noexcept {
    MemoryStats now = counts_;
    now.reserved = reserved();
    now.peak_reserved = std::max(now.peak_reserved, now.reserved);
    now.cached = now.reserved - now.current;
    now.largest_free = now.cached;
    return now;
  }

  StreamOrder* const order_;
  mutable std::mutex mutex_;
  std::optional<std::size_t> limit_;
  MemoryStats counts_;
  LiveBlock* live_ = nullptr;
  LiveBlock* stuck_ = nullptr;
};

}  // namespace

std::shared_ptr<MemoryPool> make_plain_pool(std::string_view kind,
                                            std::unique_ptr<MemoryResource> resource,
                                            PoolOptions options) {
  return std::make_shared<PlainPool>(kind, std::move(resource), std::move(options));
}

}  // namespace xpuruntime

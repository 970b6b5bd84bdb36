// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "memory/block.h"
#include "memory/size_index.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

struct CachedBlock;

/// Freed blocks of one size, used again last in, first out.
struct Bin {
  CachedBlock* head = nullptr;
  Bin* next = nullptr;  // in the home's list of bins that may hold something
  bool listed = false;
};

/// The free memory of one stream.
struct Home {
  static constexpr std::size_t kSmall = std::size_t{1} << 20;
  static constexpr std::size_t kUnit = SizeIndex<CachedBlock>::kUnit;

  explicit Home(StreamHandle of) : stream(of), small(kSmall / kUnit + 1) {}

  const StreamHandle stream;
  bool adopted = false;     // lives until it is retired
  std::uintptr_t mark = 0;  // retired: its last work; 0 when that could not be marked
  bool finished = false;    // retired: its last work is done
  std::size_t blocks = 0;   // in whatever state
  std::vector<Bin> small;   // by size / kUnit
  std::unordered_map<std::size_t, Bin> large;
  Bin* filled = nullptr;
  SizeIndex<CachedBlock> free_small;  // joined blocks in small segments, and in large ones
  SizeIndex<CachedBlock> free_large;
  std::unique_ptr<Home> next_retired;
};

/// Memory from the resource, cut into adjacent blocks.
struct Segment {
  void* pointer = nullptr;
  std::size_t size = 0;
  bool small = false;
  CachedBlock* first = nullptr;
  Segment* left = nullptr;
  Segment* right = nullptr;
};

enum class BlockState : unsigned char { kInUse, kBinned, kFree, kPending };

struct CachedBlock : Block {
  BlockState state = BlockState::kFree;
  bool unmarked = false;  // some work that uses it could not be marked
  // Its own stream is retired, and another one may have its handle by now. Where work is marked on
  // the stream that a block belongs to, that mark is among `events`.
  bool owner_marked = false;
  Home* home = nullptr;
  Bin* bin = nullptr;
  Segment* segment = nullptr;
  CachedBlock* before = nullptr;  // neighbours in the segment
  CachedBlock* after = nullptr;
  CachedBlock* left = nullptr;  // in a list of SizeIndex, a bin or the pending ones
  CachedBlock* right = nullptr;
  std::vector<StreamOrder::Event> events;
};

/// Releases a held lock for its scope.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

/// See make_caching_pool.
///
/// `mutex_` guards all members and is released over every call that may wait for the device: the
/// resource's allocate and deallocate, and waiting for events. Threads served from the cache never
/// wait for them. `growth_mutex_` (locked first) is held by the one thread that takes memory from
/// the device or gives it back, so that threads cannot pass the limit together, and none reports
/// exhausted memory while another is giving some back.
class CachingPool final : public MemoryPool {
 public:
  CachingPool(std::string_view kind, std::unique_ptr<MemoryResource> resource, PoolOptions options);
  ~CachingPool() override;

  MemoryStats stats() const override;
  void reset_peak() noexcept override;
  std::size_t trim(std::size_t keep) override;
  std::size_t empty_cache() override;
  std::optional<std::size_t> limit() const override;
  void set_limit(std::optional<std::size_t> limit) override;
  void adopt_stream(StreamHandle stream) override;
  void retire_stream(StreamHandle stream) noexcept override;
  bool free_may_wait() const noexcept override { return false; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// What waits for the device, taken out of the pool while the lock is released.
  struct Waiting {
    CachedBlock* pending = nullptr;
    std::unique_ptr<Home> retired;
  };

  Block* take(std::size_t bytes, StreamHandle stream) override;
  Block* try_take(std::size_t bytes, StreamHandle stream) noexcept override;
  void give(Block* block) noexcept override;
  void use_on(Block* block, StreamHandle stream) override;

  // Free blocks (caching_pool_blocks.cpp).
  static void push(CachedBlock* block) noexcept;
  void join(Home& home) noexcept;
  void insert_free(CachedBlock* block) noexcept;
  CachedBlock* merge(CachedBlock* first, CachedBlock* second) noexcept;
  CachedBlock* fit(Home& from, Home& to, std::size_t size, bool small);
  void move_free(Home& from, Home& to) noexcept;
  std::unique_ptr<CachedBlock> new_block();
  void recycle(CachedBlock* block) noexcept;

  // Getting memory (caching_pool.cpp).
  Home& home_of(StreamHandle stream);
  CachedBlock* find(Home& home, Bin& bin, std::size_t size);
  CachedBlock* borrow(Home& home, std::size_t size);
  void hand_out(CachedBlock* block, Bin& bin, std::size_t bytes, StreamHandle stream) noexcept;
  void detach(Segment* segment) noexcept;
  MemoryStats snapshot() const noexcept;

  // Calls to the device: with the growth mutex held, and `lock` released meanwhile.
  CachedBlock* grow_or_reclaim(StreamHandle stream, std::size_t size, Bin*& bin, Lock& lock);
  void* ask_resource(std::size_t bytes, StreamHandle stream, Lock& lock);
  CachedBlock* grow(Home& home, std::size_t size, Lock& lock);
  CachedBlock* reclaim(Home& home, Bin& bin, std::size_t size, Lock& lock);
  std::size_t release(std::size_t keep, Lock& lock) noexcept;
  bool wait_for_marks(Lock& lock) noexcept;
  void wait_for_everything(Lock& lock) noexcept;

  // The order of streams (caching_pool_streams.cpp).
  void mark(CachedBlock* block) noexcept;
  void mark_work(CachedBlock* block, StreamHandle stream) noexcept;
  void settle() noexcept;
  void settle_block(CachedBlock* block) noexcept;
  void settle_retired() noexcept;
  Waiting take_waiting() noexcept;
  void put_back(Waiting waiting) noexcept;

  StreamOrder* const order_;
  const bool marks_own_stream_;  // host memory that a device uses
  std::mutex growth_mutex_;
  mutable std::mutex mutex_;
  std::optional<std::size_t> limit_;
  MemoryStats counts_;
  Home any_{0};  // memory that any stream may use at once
  std::unordered_map<StreamHandle, std::unique_ptr<Home>> homes_;
  std::unordered_set<StreamHandle> adopted_;
  std::unique_ptr<Home> retired_;
  Segment* segments_ = nullptr;
  CachedBlock* pending_ = nullptr;
  CachedBlock* spare_ = nullptr;  // nodes to use again, by `right`
};

}  // namespace xpuruntime

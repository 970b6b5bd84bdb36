// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "memory/caching_pool.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "streams/stream_handle.h"

namespace xpuruntime {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;
constexpr std::size_t kSegment = 2 * kMiB;
constexpr std::size_t kMiddle = 16 * kMiB;
constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 4;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

constexpr std::size_t rounded(std::size_t bytes) {
  if (bytes <= Home::kSmall) return bytes == 0 ? Home::kUnit : round_up(bytes, Home::kUnit);
  return round_up(bytes, bytes < kMiddle ? 128 * kKiB : kSegment);
}

Bin& bin_of(Home& home, std::size_t size) {
  return size <= Home::kSmall ? home.small[size / Home::kUnit] : home.large[size];
}

/// Keeps a home from being destroyed while the lock is released: its stream may be retired then.
class HomePin {
 public:
  explicit HomePin(Home& home) noexcept : home_(home) { ++home_.blocks; }
  ~HomePin() { --home_.blocks; }
  HomePin(const HomePin&) = delete;
  HomePin& operator=(const HomePin&) = delete;

 private:
  Home& home_;
};

CachedBlock* pop(Bin& bin) noexcept {
  CachedBlock* const block = bin.head;
  if (block != nullptr) bin.head = std::exchange(block->right, nullptr);
  return block;
}

}  // namespace

CachingPool::CachingPool(std::string_view kind, std::unique_ptr<MemoryResource> resource,
                         PoolOptions options)
    : MemoryPool(kind, std::move(resource), options),
      order_(resource_->order()),
      marks_own_stream_(order_ != nullptr && resource_->host_accessible()),
      limit_(options.limit) {}

CachingPool::~CachingPool() {
  Lock lock(mutex_);
  wait_for_everything(lock);
  release(0, lock);
  while (CachedBlock* block = spare_) {
    spare_ = block->right;
    delete block;
  }
}

Home& CachingPool::home_of(StreamHandle stream) {
  if (order_ == nullptr || marks_own_stream_) return any_;
  std::unique_ptr<Home>& home = homes_[stream];
  if (home == nullptr) {
    home = std::make_unique<Home>(stream);
    home->adopted = stream == 0 || adopted_.contains(stream);
  }
  return *home;
}

Block* CachingPool::take(std::size_t bytes, StreamHandle stream) {
  std::unique_lock lock(mutex_);
  CachedBlock* block = nullptr;
  Bin* bin = nullptr;
  if (bytes < kMost) {
    const std::size_t size = rounded(bytes);
    Home& home = home_of(stream);
    bin = &bin_of(home, size);
    block = find(home, *bin, size);
    if (block == nullptr && !(limit_ && size > *limit_)) {
      lock.unlock();
      const std::lock_guard growth(growth_mutex_);
      lock.lock();
      block = grow_or_reclaim(stream, size, bin, lock);
    }
  }
  if (block == nullptr) {
    ++counts_.failures;
    const MemoryStats now = snapshot();
    const auto limit = limit_;
    lock.unlock();
    throw_out_of_memory(bytes, now, limit);
  }
  hand_out(block, *bin, bytes, stream);
  return block;
}

CachedBlock* CachingPool::grow_or_reclaim(StreamHandle stream, std::size_t size, Bin*& bin,
                                          Lock& lock) {
  Home& home = home_of(stream);
  const HomePin pin(home);
  bin = &bin_of(home, size);
  // Threads that waited for the growth mutex may find what the one before them left.
  CachedBlock* block = find(home, *bin, size);
  if (block == nullptr) block = grow(home, size, lock);
  if (block == nullptr) block = borrow(home, size);
  if (block == nullptr) block = reclaim(home, *bin, size, lock);
  return block;
}

Block* CachingPool::try_take(std::size_t bytes, StreamHandle stream) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || bytes >= kMost) return nullptr;
  Home* home = &any_;
  if (order_ != nullptr && !marks_own_stream_) {
    const auto found = homes_.find(stream);
    if (found == homes_.end()) return nullptr;
    home = found->second.get();
  }
  const std::size_t size = rounded(bytes);
  Bin* bin = nullptr;
  if (size <= Home::kSmall) {
    bin = &home->small[size / Home::kUnit];
  } else {
    const auto found = home->large.find(size);
    if (found == home->large.end()) return nullptr;
    bin = &found->second;
  }
  CachedBlock* const block = pop(*bin);
  if (block != nullptr) hand_out(block, *bin, bytes, stream);
  return block;
}

void CachingPool::hand_out(CachedBlock* block, Bin& bin, std::size_t bytes,
                           StreamHandle stream) noexcept {
  block->state = BlockState::kInUse;
  block->bin = &bin;
  block->requested = bytes;
  block->stream = stream;
  counts_.requested += bytes;
  counts_.current += block->size;
  counts_.peak = std::max(counts_.peak, counts_.current);
  ++counts_.allocations;
  ++counts_.total_allocations;
}

void CachingPool::give(Block* base) noexcept {
  auto* const block = static_cast<CachedBlock*>(base);
  const std::lock_guard lock(mutex_);
  counts_.requested -= block->requested;
  counts_.current -= block->size;
  --counts_.allocations;
  mark(block);
}

CachedBlock* CachingPool::find(Home& home, Bin& bin, std::size_t size) {
  if (CachedBlock* block = pop(bin)) return block;
  settle();
  if (CachedBlock* block = pop(bin)) return block;
  const bool small = size <= Home::kSmall;
  join(home);
  if (CachedBlock* block = fit(home, home, size, small)) return block;
  if (&home == &any_) return nullptr;
  join(any_);
  return fit(any_, home, size, small);
}

void* CachingPool::ask_resource(std::size_t bytes, StreamHandle stream, Lock& lock) {
  ++counts_.upstream_allocations;
  const Unlocked unlocked(lock);
  return resource_->allocate(bytes, stream);
}

CachedBlock* CachingPool::grow(Home& home, std::size_t size, Lock& lock) {
  const bool small = size <= Home::kSmall;
  std::size_t bytes = round_up(size, kSegment);
  if (limit_) {
    const std::size_t room = *limit_ > counts_.reserved ? *limit_ - counts_.reserved : 0;
    if (size > room) return nullptr;
    bytes = std::min(bytes, room / Home::kUnit * Home::kUnit);
  }
  auto segment = std::make_unique<Segment>();
  std::unique_ptr<CachedBlock> block = new_block();
  segment->pointer = ask_resource(bytes, home.stream, lock);
  if (segment->pointer == nullptr && bytes > size) {
    bytes = size;
    segment->pointer = ask_resource(bytes, home.stream, lock);
  }
  if (segment->pointer == nullptr) {
    recycle(block.release());
    return nullptr;
  }
  segment->size = bytes;
  segment->small = small;
  segment->first = block.get();
  segment->right = segments_;
  block->pointer = segment->pointer;
  block->size = bytes;
  block->home = &home;
  block->segment = segment.get();
  if (segments_ != nullptr) segments_->left = segment.get();
  segments_ = segment.release();
  ++home.blocks;
  counts_.reserved += bytes;
  counts_.peak_reserved = std::max(counts_.peak_reserved, counts_.reserved);
  insert_free(block.release());
  return fit(home, home, size, small);
}

CachedBlock* CachingPool::borrow(Home& home, std::size_t size) {
  if (&home == &any_) return nullptr;
  const bool small = size <= Home::kSmall;
  for (auto& [stream, other] : homes_) {
    if (other.get() == &home || !other->adopted) continue;
    join(*other);
    if ((small ? other->free_small : other->free_large).find(size) == nullptr) continue;
    const StreamOrder::Event event = order_->record(stream);
    if (event == 0) continue;
    const bool ordered = order_->wait(home.stream, event);
    order_->destroy(event);
    if (ordered) return fit(*other, home, size, small);
  }
  return nullptr;
}

CachedBlock* CachingPool::reclaim(Home& home, Bin& bin, std::size_t size, Lock& lock) {
  const bool small = size <= Home::kSmall;
  release(0, lock);
  if (CachedBlock* block = find(home, bin, size)) return block;
  if (CachedBlock* block = grow(home, size, lock)) return block;
  if (CachedBlock* block = fit(home, home, size, !small)) return block;
  if (!wait_for_marks(lock)) return nullptr;
  if (CachedBlock* block = find(home, bin, size)) return block;
  release(0, lock);
  if (CachedBlock* block = find(home, bin, size)) return block;
  return grow(home, size, lock);
}

std::size_t CachingPool::release(std::size_t keep, Lock& lock) noexcept {
  settle();
  join(any_);
  for (auto& [stream, home] : homes_) join(*home);
  std::size_t released = 0;
  Segment* unused = nullptr;
  for (Segment* segment = segments_; segment != nullptr;) {
    if (counts_.reserved - counts_.current - released <= keep) break;
    Segment* const next = segment->right;
    // Free blocks of different streams do not join, but giving memory back waits for all of them.
    bool free = true;
    for (const CachedBlock* block = segment->first; block != nullptr; block = block->after) {
      free &= block->state == BlockState::kFree;
    }
    if (free) {
      released += segment->size;
      detach(segment);
      segment->right = std::exchange(unused, segment);
    }
    segment = next;
  }
  if (unused == nullptr) return 0;
  {
    const Unlocked unlocked(lock);
    while (unused != nullptr) {
      const std::unique_ptr<Segment> segment(std::exchange(unused, unused->right));
      resource_->deallocate(segment->pointer, segment->size, 0);
    }
  }
  // They count against the limit until they are gone.
  counts_.reserved -= released;
  return released;
}

void CachingPool::detach(Segment* segment) noexcept {
  while (CachedBlock* block = segment->first) {
    segment->first = block->after;
    (segment->small ? block->home->free_small : block->home->free_large).remove(block);
    --block->home->blocks;
    recycle(block);
  }
  (segment->left != nullptr ? segment->left->right : segments_) = segment->right;
  if (segment->right != nullptr) segment->right->left = segment->left;
  segment->left = nullptr;
}

std::size_t CachingPool::trim(std::size_t keep) {
  const std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  return release(keep, lock);
}

std::size_t CachingPool::empty_cache() {
  const std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  wait_for_everything(lock);
  return release(0, lock);
}

std::optional<std::size_t> CachingPool::limit() const {
  const std::lock_guard lock(mutex_);
  return limit_;
}

void CachingPool::set_limit(std::optional<std::size_t> limit) {
  const std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  limit_ = limit;
  if (limit && counts_.reserved > *limit) {
    release(*limit > counts_.current ? *limit - counts_.current : 0, lock);
  }
}

MemoryStats CachingPool::stats() const {
  const std::lock_guard lock(mutex_);
  return snapshot();
}

void CachingPool::reset_peak() noexcept {
  const std::lock_guard lock(mutex_);
  counts_.peak = counts_.current;
  counts_.peak_reserved = counts_.reserved;
}

MemoryStats CachingPool::snapshot() const noexcept {
  MemoryStats now = counts_;
  now.cached = now.reserved - now.current;
  for (const Segment* segment = segments_; segment != nullptr; segment = segment->right) {
    std::size_t run = 0;
    const Home* home = nullptr;
    for (const CachedBlock* block = segment->first; block != nullptr; block = block->after) {
      const bool free = block->state == BlockState::kFree || block->state == BlockState::kBinned;
      run = free ? (block->home == home ? run : 0) + block->size : 0;
      home = free ? block->home : nullptr;
      now.largest_free = std::max(now.largest_free, run);
    }
  }
  return now;
}

std::shared_ptr<MemoryPool> make_caching_pool(std::string_view kind,
                                              std::unique_ptr<MemoryResource> resource,
                                              PoolOptions options) {
  return std::make_shared<CachingPool>(kind, std::move(resource), std::move(options));
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <utility>

#include "memory/caching_pool.h"
#include "streams/stream_handle.h"

namespace xpuruntime {

void CachingPool::use_on(Block* base, StreamHandle stream) {
  stream = checked_stream(stream);
  if (order_ == nullptr) return;
  auto* const block = static_cast<CachedBlock*>(base);
  const std::lock_guard lock(mutex_);
  if (stream == block->stream && !block->owner_marked) return;
  auto& streams = block->used_on;
  if (std::find(streams.begin(), streams.end(), stream) != streams.end()) return;
  // Room for every mark now, as freeing must not fail: these, those of retired streams, and its
  // own.
  block->events.reserve(block->events.size() + streams.size() + 2);
  streams.push_back(stream);
}

void CachingPool::adopt_stream(StreamHandle stream) {
  stream = checked_stream(stream);
  if (order_ == nullptr || marks_own_stream_) return;
  const std::lock_guard lock(mutex_);
  adopted_.insert(stream);
  const auto found = homes_.find(stream);
  if (found != homes_.end()) found->second->adopted = true;
}

void CachingPool::retire_stream(StreamHandle stream) noexcept {
  if (order_ == nullptr || stream <= kPerThreadStream) return;
  const std::lock_guard lock(mutex_);
  for (Segment* segment = segments_; segment != nullptr; segment = segment->right) {
    for (CachedBlock* block = segment->first; block != nullptr; block = block->after) {
      if (block->state != BlockState::kInUse) continue;
      if (std::erase(block->used_on, stream) > 0) mark_work(block, stream);
      if (block->stream == stream && !block->owner_marked) {
        block->owner_marked = true;
        if (marks_own_stream_) mark_work(block, stream);
      }
    }
  }
  adopted_.erase(stream);
  const auto found = homes_.find(stream);
  if (found == homes_.end()) return;
  std::unique_ptr<Home> home = std::move(found->second);
  homes_.erase(found);
  home->mark = order_->record(stream);
  home->next_retired = std::move(retired_);
  retired_ = std::move(home);
  settle_retired();
}

void CachingPool::mark_work(CachedBlock* block, StreamHandle stream) noexcept {
  const StreamOrder::Event event = order_->record(stream);
  if (event == 0) {
    block->unmarked = true;
  } else {
    block->events.push_back(event);
  }
}

// A freed block goes to its bin, or waits for the marks of the work that uses it.
void CachingPool::mark(CachedBlock* block) noexcept {
  if (order_ != nullptr) {
    for (const StreamHandle stream : block->used_on) mark_work(block, stream);
    block->used_on.clear();
    if (marks_own_stream_ && !block->owner_marked) mark_work(block, block->stream);
    if (block->unmarked || !block->events.empty()) {
      block->state = BlockState::kPending;
      block->left = nullptr;
      block->right = pending_;
      if (pending_ != nullptr) pending_->left = block;
      pending_ = block;
      counts_.pending += block->size;
      return;
    }
    block->owner_marked = false;
  }
  push(block);
}

void CachingPool::settle_block(CachedBlock* block) noexcept {
  for (const StreamOrder::Event event : block->events) order_->destroy(event);
  block->events.clear();
  block->unmarked = false;
  block->owner_marked = false;
  (block->left != nullptr ? block->left->right : pending_) = block->right;
  if (block->right != nullptr) block->right->left = block->left;
  block->left = block->right = nullptr;
  counts_.pending -= block->size;
  push(block);
}

void CachingPool::settle() noexcept {
  for (CachedBlock* block = pending_; block != nullptr;) {
    CachedBlock* const next = block->right;
    const auto finished = [this](StreamOrder::Event event) { return order_->finished(event); };
    if (!block->unmarked && std::all_of(block->events.begin(), block->events.end(), finished)) {
      settle_block(block);
    }
    block = next;
  }
  if (retired_ != nullptr) settle_retired();
}

// Free memory of a retired stream goes to everybody once the stream's work is done.
void CachingPool::settle_retired() noexcept {
  for (std::unique_ptr<Home>* slot = &retired_; *slot != nullptr;) {
    Home& home = **slot;
    if (home.mark != 0 && (home.finished || order_->finished(home.mark))) {
      order_->destroy(std::exchange(home.mark, 0));
      home.finished = true;
    }
    if (home.finished) {
      join(home);
      move_free(home, any_);
      if (home.blocks == 0) {
        *slot = std::move(home.next_retired);
        continue;
      }
    }
    slot = &home.next_retired;
  }
}

CachingPool::Waiting CachingPool::take_waiting() noexcept {
  return {.pending = std::exchange(pending_, nullptr), .retired = std::move(retired_)};
}

void CachingPool::put_back(Waiting waiting) noexcept {
  CachedBlock** last = &waiting.pending;
  CachedBlock* before = nullptr;
  while (*last != nullptr) {
    before = *last;
    last = &before->right;
  }
  *last = pending_;
  if (pending_ != nullptr) pending_->left = before;
  pending_ = waiting.pending;
  std::unique_ptr<Home>* end = &waiting.retired;
  while (*end != nullptr) end = &(*end)->next_retired;
  *end = std::move(retired_);
  retired_ = std::move(waiting.retired);
}

bool CachingPool::wait_for_marks(Lock& lock) noexcept {
  Waiting waiting = take_waiting();
  bool waited = false;
  {
    const Unlocked unlocked(lock);
    for (const CachedBlock* block = waiting.pending; block != nullptr; block = block->right) {
      for (const StreamOrder::Event event : block->events) waited |= order_->synchronize(event);
    }
    for (const Home* home = waiting.retired.get(); home != nullptr;
         home = home->next_retired.get()) {
      if (home->mark != 0) waited |= order_->synchronize(home->mark);
    }
  }
  put_back(std::move(waiting));
  if (waited) settle();
  return waited;
}

void CachingPool::wait_for_everything(Lock& lock) noexcept {
  if (pending_ == nullptr && retired_ == nullptr) return;
  settle();
  if (pending_ == nullptr && retired_ == nullptr) return;
  Waiting waiting = take_waiting();
  bool waited = false;
  {
    const Unlocked unlocked(lock);
    waited = order_->synchronize_all();
  }
  // What came meanwhile may not be finished.
  Waiting later = take_waiting();
  put_back(std::move(waiting));
  if (waited) {
    while (pending_ != nullptr) settle_block(pending_);
    for (Home* home = retired_.get(); home != nullptr; home = home->next_retired.get()) {
      home->finished = true;
    }
  }
  put_back(std::move(later));
  if (waited) settle_retired();
}

}  // namespace xpuruntime

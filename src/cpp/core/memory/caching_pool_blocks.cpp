// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <utility>

#include "memory/caching_pool.h"

namespace xpuruntime {
namespace {

// A smaller rest than this stays with a large block.
constexpr std::size_t kMinLargeRest = std::size_t{128} << 10;

SizeIndex<CachedBlock>& index_of(Home& home, bool small) noexcept {
  return small ? home.free_small : home.free_large;
}

void remove_free(CachedBlock* block) noexcept {
  index_of(*block->home, block->segment->small).remove(block);
}

bool joins(const CachedBlock* a, const CachedBlock* b) noexcept {
  return b != nullptr && b->state == BlockState::kFree && b->home == a->home;
}

}  // namespace

std::unique_ptr<CachedBlock> CachingPool::new_block() {
  if (spare_ != nullptr) {
    std::unique_ptr<CachedBlock> block(spare_);
    spare_ = std::exchange(block->right, nullptr);
    return block;
  }
  auto block = std::make_unique<CachedBlock>();
  if (marks_own_stream_) block->events.reserve(1);
  return block;
}

void CachingPool::recycle(CachedBlock* block) noexcept {
  block->before = block->after = block->left = nullptr;
  block->home = nullptr;
  block->bin = nullptr;
  block->segment = nullptr;
  block->right = std::exchange(spare_, block);
}

CachedBlock* CachingPool::merge(CachedBlock* first, CachedBlock* second) noexcept {
  first->size += second->size;
  first->after = second->after;
  if (first->after != nullptr) first->after->before = first;
  --second->home->blocks;
  recycle(second);
  return first;
}

void CachingPool::insert_free(CachedBlock* block) noexcept {
  block->state = BlockState::kFree;
  if (joins(block, block->before)) {
    remove_free(block->before);
    block = merge(block->before, block);
  }
  if (joins(block, block->after)) {
    remove_free(block->after);
    merge(block, block->after);
  }
  index_of(*block->home, block->segment->small).insert(block);
}

void CachingPool::push(CachedBlock* block) noexcept {
  Bin& bin = *block->bin;
  block->state = BlockState::kBinned;
  block->right = std::exchange(bin.head, block);
  if (bin.listed) return;
  bin.listed = true;
  bin.next = std::exchange(block->home->filled, &bin);
}

void CachingPool::join(Home& home) noexcept {
  while (Bin* bin = home.filled) {
    home.filled = std::exchange(bin->next, nullptr);
    bin->listed = false;
    while (CachedBlock* block = bin->head) {
      bin->head = std::exchange(block->right, nullptr);
      insert_free(block);
    }
  }
}

CachedBlock* CachingPool::fit(Home& from, Home& to, std::size_t size, bool small) {
  CachedBlock* const block = index_of(from, small).find(size);
  if (block == nullptr) return nullptr;
  const std::size_t rest = block->size - size;
  const std::size_t least = size <= Home::kSmall ? Home::kUnit : kMinLargeRest;
  std::unique_ptr<CachedBlock> tail = rest >= least ? new_block() : nullptr;
  remove_free(block);
  block->state = BlockState::kInUse;
  if (tail != nullptr) {
    tail->pointer = static_cast<std::byte*>(block->pointer) + size;
    tail->size = rest;
    tail->home = &from;
    tail->segment = block->segment;
    tail->before = block;
    tail->after = block->after;
    if (tail->after != nullptr) tail->after->before = tail.get();
    block->after = tail.get();
    block->size = size;
    ++from.blocks;
    insert_free(tail.release());
  }
  --from.blocks;
  ++to.blocks;
  block->home = &to;
  return block;
}

void CachingPool::move_free(Home& from, Home& to) noexcept {
  for (const bool small : {true, false}) {
    SizeIndex<CachedBlock>& index = index_of(from, small);
    while (CachedBlock* block = index.any()) {
      index.remove(block);
      --from.blocks;
      ++to.blocks;
      block->home = &to;
      insert_free(block);
    }
  }
}

}  // namespace xpuruntime

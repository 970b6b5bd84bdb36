// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "streams/graph_blocks.h"

#include <memory>
#include <utility>

#include "xpuruntime/error.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {

GraphBlocks& GraphBlocks::instance() {
  static GraphBlocks* const made = new GraphBlocks;
  return *made;
}

GraphBlocks::View GraphBlocks::give(MemoryManager& memory, DeviceId device,
                                    const calls::Capture& capture, std::size_t bytes) {
  std::unique_ptr<Block> block(take_idle(device, bytes));
  if (block == nullptr) {
    block = std::make_unique<Block>();
    const auto pool =
        memory.make_pool(device, "direct", {.name = "graphs@" + to_string(device), .limit = {}});
    try {
      block->buffer = pool->allocate(bytes, 0);
    } catch (const OutOfMemoryError&) {
      release_idle();
      block->buffer = pool->allocate(bytes, 0);
    }
    const std::lock_guard lock(mutex_);
    bytes_ += block->buffer.size();
  }
  const View view{block->buffer.data(), block->buffer.size()};
  try {
    calls::keep_in_graph(device.index, capture.graph, block.get(), on_graph_gone);
  } catch (...) {
    put_idle(block.release());
    throw;
  }
  (void)block.release();  // the graph's now
  return view;
}

void GraphBlocks::on_graph_gone(void* block) noexcept {
  instance().put_idle(static_cast<Block*>(block));
}

void GraphBlocks::put_idle(Block* block) noexcept {
  const std::lock_guard lock(mutex_);
  block->next = std::exchange(idle_, block);
}

GraphBlocks::Block* GraphBlocks::take_idle(DeviceId device, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Block** best = nullptr;
  for (Block** link = &idle_; *link != nullptr; link = &(*link)->next) {
    const Buffer& buffer = (*link)->buffer;
    // Twice the size is too much to hold for it.
    if (buffer.pool()->device() != device || buffer.size() < bytes || buffer.size() / 2 > bytes) {
      continue;
    }
    if (best == nullptr || buffer.size() < (*best)->buffer.size()) best = link;
  }
  if (best == nullptr) return nullptr;
  Block* const taken = *best;
  *best = taken->next;
  return taken;
}

void GraphBlocks::release_idle() noexcept {
  Block* list = nullptr;
  {
    const std::lock_guard lock(mutex_);
    list = std::exchange(idle_, nullptr);
    for (const Block* block = list; block != nullptr; block = block->next) {
      bytes_ -= block->buffer.size();
    }
  }
  while (list != nullptr) {
    const std::unique_ptr<Block> block(list);
    list = block->next;
  }
}

std::size_t GraphBlocks::bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace xpuruntime

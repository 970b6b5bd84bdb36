// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/engine_allocator.h"

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "streams/stream_handle.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

struct Slot {
  std::mutex mutex;
  bool taken = false;  // by an EngineAllocator, or by allocations that outlive it
  bool open = false;   // gives memory
  StreamHandle stream = 0;
  std::shared_ptr<MemoryPool> pool;
  std::unordered_map<void*, Buffer> buffers;
  EngineAllocatorStats stats;
  EngineAllocator::Failure failure;
};

// Never destroyed: an engine may free while the process ends.
std::array<Slot, kEngineAllocatorSlots>& kept_slots() {
  static auto* const all = new std::array<Slot, kEngineAllocatorSlots>;
  return *all;
}

void fail(Slot& slot, std::size_t bytes, const char* reason) noexcept {
  const std::lock_guard lock(slot.mutex);
  ++slot.stats.failures;
  slot.failure.requested = bytes;
  try {
    slot.failure.reason = reason;
  } catch (...) {
    slot.failure.reason.clear();
  }
}

void* allocate(Slot& slot, std::size_t bytes) noexcept {
  try {
    std::shared_ptr<MemoryPool> pool;
    StreamHandle stream = 0;
    {
      const std::lock_guard lock(slot.mutex);
      if (slot.open) pool = slot.pool;
      stream = slot.stream;
    }
    if (pool == nullptr) {
      fail(slot, bytes, "the allocator of this engine is closed");
      return nullptr;
    }
    Buffer buffer = pool->allocate(bytes, stream);
    void* const pointer = buffer.data();
    const std::lock_guard lock(slot.mutex);
    slot.buffers.emplace(pointer, std::move(buffer));
    slot.stats.current += bytes;
    slot.stats.peak = std::max(slot.stats.peak, slot.stats.current);
    ++slot.stats.allocations;
    ++slot.stats.total_allocations;
    return pointer;
  } catch (const std::exception& error) {
    fail(slot, bytes, error.what());
  } catch (...) {
    fail(slot, bytes, "unknown failure");
  }
  return nullptr;
}

void deallocate(Slot& slot, void* pointer) noexcept {
  if (pointer == nullptr) return;
  // Freed after the lock is released, as that may wait for the device.
  std::unordered_map<void*, Buffer>::node_type node;
  std::shared_ptr<MemoryPool> last;
  const std::lock_guard lock(slot.mutex);
  node = slot.buffers.extract(pointer);
  if (node.empty()) {
    ++slot.stats.foreign_frees;
    return;
  }
  slot.stats.current -= node.mapped().size();
  --slot.stats.allocations;
  if (!slot.open && slot.buffers.empty()) {
    last = std::move(slot.pool);
    slot.taken = false;
  }
}

void empty_cache(Slot& slot) noexcept {
  try {
    std::shared_ptr<MemoryPool> pool;
    {
      const std::lock_guard lock(slot.mutex);
      pool = slot.pool;
    }
    if (pool != nullptr) pool->empty_cache();
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // The engine asked for a favour; that it was not possible changes nothing for it.
  }
}

// One set of C functions a slot, since they get no user data.
template <std::size_t kSlot>
struct Entry {
  static void* alloc(std::size_t bytes) { return allocate(kept_slots()[kSlot], bytes); }
  static void free(void* pointer) { deallocate(kept_slots()[kSlot], pointer); }
  static void empty() { empty_cache(kept_slots()[kSlot]); }
};

struct Functions {
  void* (*alloc)(std::size_t);
  void (*free)(void*);
  void (*empty)();
};

template <std::size_t... kSlots>
constexpr std::array<Functions, sizeof...(kSlots)> make_table(std::index_sequence<kSlots...>) {
  return {{{&Entry<kSlots>::alloc, &Entry<kSlots>::free, &Entry<kSlots>::empty}...}};
}

constexpr auto kTable = make_table(std::make_index_sequence<kEngineAllocatorSlots>{});

}  // namespace

EngineAllocator::EngineAllocator(std::shared_ptr<MemoryPool> pool, StreamHandle stream)
    : pool_(std::move(pool)), stream_(checked_stream(stream)), slot_(kEngineAllocatorSlots) {
  if (pool_ == nullptr) throw InputError("an engine allocator needs a pool");
  for (std::size_t i = 0; i < kEngineAllocatorSlots; ++i) {
    Slot& slot = kept_slots()[i];
    const std::lock_guard lock(slot.mutex);
    if (slot.taken) continue;
    slot.taken = slot.open = true;
    slot.stream = stream_;
    slot.pool = pool_;
    slot.stats = {};
    slot.failure = {};
    slot_ = i;
    return;
  }
  throw UnsupportedOperationError(
      "all " + std::to_string(kEngineAllocatorSlots) +
          " engine allocators of this process are taken: close sessions that use a pool of "
          "xpuruntime, or "
          "open this one with the engine's own memory (memory: {pool: engine})",
      to_string(pool_->device()));
}

EngineAllocator::~EngineAllocator() {
  Slot& slot = kept_slots()[slot_];
  const std::lock_guard lock(slot.mutex);
  slot.open = false;
  if (!slot.buffers.empty()) return;
  slot.pool.reset();
  slot.taken = false;
}

std::uintptr_t EngineAllocator::alloc_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].alloc);
}

std::uintptr_t EngineAllocator::free_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].free);
}

std::uintptr_t EngineAllocator::empty_cache_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].empty);
}

EngineAllocatorStats EngineAllocator::stats() const {
  Slot& slot = kept_slots()[slot_];
  const std::lock_guard lock(slot.mutex);
  return slot.stats;
}

EngineAllocator::Failure EngineAllocator::take_failure() {
  Slot& slot = kept_slots()[slot_];
  const std::lock_guard lock(slot.mutex);
  return std::exchange(slot.failure, {});
}

std::size_t EngineAllocator::available() {
  std::size_t free = 0;
  for (Slot& slot : kept_slots()) {
    const std::lock_guard lock(slot.mutex);
    free += slot.taken ? 0 : 1;
  }
  return free;
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "allocator/torch_allocator.h"

#include <algorithm>
#include <array>
#include <exception>
#include <unordered_set>
#include <utility>

#include "allocator/torch_allocator_slot.h"
#include "streams/stream_handle.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

using torch_allocator::Slot;

// Never destroyed: PyTorch may free while the process ends.
std::array<Slot, kTorchAllocatorSlots>& slots() {
  static auto* const all = new std::array<Slot, kTorchAllocatorSlots>;
  return *all;
}

// One set of C functions a slot, since they get no user data.
template <std::size_t kSlot>
struct Entry {
  static void* alloc(std::size_t bytes, int device, void* stream) {
    return slots()[kSlot].allocate(bytes, device, reinterpret_cast<StreamHandle>(stream));
  }
  static void free(void* pointer, std::size_t /*bytes*/, int /*device*/, void* /*stream*/) {
    slots()[kSlot].deallocate(pointer);
  }
  static void record_stream(void* pointer, void* stream) {
    slots()[kSlot].record_stream(pointer, reinterpret_cast<StreamHandle>(stream));
  }
  static void empty_cache() { slots()[kSlot].empty_cache(); }
  static void memory_fraction(double fraction, int device) {
    slots()[kSlot].set_memory_fraction(fraction, device);
  }
};

struct Functions {
  void* (*alloc)(std::size_t, int, void*);
  void (*free)(void*, std::size_t, int, void*);
  void (*record_stream)(void*, void*);
  void (*empty_cache)();
  void (*memory_fraction)(double, int);
};

template <std::size_t... kSlots>
constexpr std::array<Functions, sizeof...(kSlots)> make_table(std::index_sequence<kSlots...>) {
  return {{{&Entry<kSlots>::alloc, &Entry<kSlots>::free, &Entry<kSlots>::record_stream,
            &Entry<kSlots>::empty_cache, &Entry<kSlots>::memory_fraction}...}};
}

constexpr auto kTable = make_table(std::make_index_sequence<kTorchAllocatorSlots>{});

void check_pools(const std::vector<std::shared_ptr<MemoryPool>>& pools) {
  if (pools.empty()) throw InputError("a torch allocator needs a pool");
  std::unordered_set<int> devices;
  for (const auto& pool : pools) {
    if (pool == nullptr) throw InputError("a torch allocator needs a pool, not none");
    const std::string where = to_string(pool->device());
    if (pool->device().type != DeviceType::kCuda || pool->host_accessible()) {
      throw InputError("pool '" + pool->name() + "' (" + std::string(pool->kind()) + " on " +
                           where +
                           ") gives host memory, and PyTorch's allocator of a CUDA device needs "
                           "memory of that device: take a pool of kind 'caching' or 'direct' on it",
                       where);
    }
    if (!devices.insert(pool->device().index).second) {
      throw InputError("two pools for " + where + ": a torch allocator takes one a device", where);
    }
  }
}

}  // namespace

TorchAllocator::TorchAllocator(std::vector<std::shared_ptr<MemoryPool>> pools, Failing failing)
    : pools_(std::move(pools)), failing_(failing), slot_(kTorchAllocatorSlots) {
  check_pools(pools_);
  std::sort(pools_.begin(), pools_.end(), [](const auto& one, const auto& other) {
    return one->device().index < other->device().index;
  });
  // Making one is rare. Without this lock, two threads could each take a slot for the same pools.
  static std::mutex making;
  const std::lock_guard lock(making);
  for (std::size_t i = 0; i < kTorchAllocatorSlots; ++i) {
    if (slots()[i].join(pools_, failing_)) {
      slot_ = i;
      return;
    }
  }
  for (std::size_t i = 0; i < kTorchAllocatorSlots; ++i) {
    if (slots()[i].open(pools_, failing_)) {
      slot_ = i;
      return;
    }
  }
  throw UnsupportedOperationError(
      "all " + std::to_string(kTorchAllocatorSlots) +
          " allocators for PyTorch are taken, each by a pool of its own that tensors or open "
          "scopes still use: take one pool for several scopes (pool=), or free the tensors",
      to_string(pools_.front()->device()));
}

TorchAllocator::~TorchAllocator() { slots()[slot_].leave(); }

std::uintptr_t TorchAllocator::alloc_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].alloc);
}

std::uintptr_t TorchAllocator::free_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].free);
}

std::uintptr_t TorchAllocator::record_stream_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].record_stream);
}

std::uintptr_t TorchAllocator::empty_cache_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].empty_cache);
}

std::uintptr_t TorchAllocator::memory_fraction_address() const noexcept {
  return reinterpret_cast<std::uintptr_t>(kTable[slot_].memory_fraction);
}

TorchAllocatorStats TorchAllocator::stats(std::optional<int> device) const {
  return slots()[slot_].stats(device);
}

TorchAllocator::Failure TorchAllocator::take_failure() { return slots()[slot_].take_failure(); }

std::size_t TorchAllocator::available() {
  std::size_t free = 0;
  for (Slot& slot : slots()) free += slot.available() ? 1U : 0U;
  return free;
}

}  // namespace xpuruntime

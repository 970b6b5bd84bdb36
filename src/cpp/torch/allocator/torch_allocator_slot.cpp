// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "allocator/torch_allocator_slot.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "streams/stream_handle.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"

namespace xpuruntime {

CaptureCalls& CaptureCalls::instance() {
  static CaptureCalls calls;
  return calls;
}

namespace torch_allocator {
namespace {

// 0 for none, and for one that has failed: nothing of it will ever run.
std::uint64_t capture_on(int device, StreamHandle stream) noexcept {
  try {
    const auto capture = CaptureCalls::instance().of(device, stream);
    return capture ? capture->id : 0;
  } catch (...) {
    return 0;
  }
}

}  // namespace

bool Slot::join(const std::vector<std::shared_ptr<MemoryPool>>& pools,
                TorchAllocator::Failing failing) {
  const std::lock_guard lock(mutex_);
  if (users_ == 0 || pools_ != pools || failing_ != failing) return false;
  ++users_;
  return true;
}

bool Slot::open(const std::vector<std::shared_ptr<MemoryPool>>& pools,
                TorchAllocator::Failing failing) {
  settle();
  const std::lock_guard lock(mutex_);
  if (users_ != 0 || lent_ != 0) return false;
  pools_ = pools;
  failing_ = failing;
  counts_.clear();
  for (const auto& pool : pools) counts_[pool->device().index] = {};
  failure_ = {};
  users_ = 1;
  return true;
}

void Slot::leave() noexcept {
  settle();
  std::vector<std::shared_ptr<MemoryPool>> last;
  const std::lock_guard lock(mutex_);
  if (--users_ == 0) last.swap(pools_);  // buffers keep theirs
}

bool Slot::available() {
  settle();
  const std::lock_guard lock(mutex_);
  return users_ == 0 && lent_ == 0;
}

std::shared_ptr<MemoryPool> Slot::pool_for(int device) {
  const std::lock_guard lock(mutex_);
  const std::string where = to_string(DeviceId{DeviceType::kCuda, device});
  if (users_ == 0) {
    throw UnsupportedOperationError(
        "this allocator of PyTorch's memory is closed: open another with set_allocator()", where);
  }
  for (const auto& pool : pools_) {
    if (pool->device().index == device) return pool;
  }
  throw InputError("this allocator of PyTorch's memory has no pool on " + where, where);
}

void* Slot::allocate(std::size_t bytes, int device, StreamHandle stream) {
  try {
    return lend(bytes, device, checked_stream(stream))->buffer.data();
  } catch (const std::exception& error) {
    fail(bytes, device, error.what());
    if (failing_ == TorchAllocator::Failing::kThrow) throw;
  }
  return nullptr;
}

Lent* Slot::lend(std::size_t bytes, int device, StreamHandle stream) {
  settle();
  const std::shared_ptr<MemoryPool> pool = pool_for(device);
  const auto capture = CaptureCalls::instance().of(device, stream);
  if (capture) {
    if (Lent* const lent = reuse(bytes, device, stream, capture->id)) return lent;
    if (pool->kind() == "driver") {
      throw UnsupportedOperationError(
          "pool '" + pool->name() +
              "' of kind 'driver' cannot give memory while a CUDA graph is captured, because the "
              "graph would own it: take a pool of kind 'caching'",
          to_string(pool->device()));
    }
  }
  auto made = std::make_unique<Lent>();
  made->slot = this;
  made->device = device;
  try {
    made->buffer = pool->allocate(bytes, stream);
  } catch (const OutOfMemoryError&) {
    // What waits for work that no event could mark comes back only when the device is idle, and
    // waiting for that would break a capture.
    if (capture || pool->stats().pending == 0) throw;
    pool->empty_cache();
    made->buffer = pool->allocate(bytes, stream);
  }
  Lent* const lent = made.get();
  hand_out(std::move(made));
  if (capture) {
    lent->capture = capture->id;
    lent->holders = 2;
    try {
      CaptureCalls::instance().keep(device, capture->graph, lent, on_graph_gone);
    } catch (...) {
      lent->capture = 0;
      lent->holders = 1;
      deallocate(lent->buffer.data());
      throw;
    }
  }
  return lent;
}

void Slot::hand_out(std::unique_ptr<Lent> lent) {
  const std::lock_guard lock(mutex_);
  live_.emplace(lent->buffer.data(), lent.get());
  ++lent_;
  count_in(*lent.release());
}

void Slot::count_in(const Lent& lent) {
  TorchAllocatorStats& counts = counts_[lent.device];
  counts.current += lent.buffer.size();
  counts.peak = std::max(counts.peak, counts.current);
  ++counts.allocations;
  ++counts.total_allocations;
}

// Memory that was freed in the same capture, on the same stream and on no other: in the graph, its
// new use comes after the old one.
Lent* Slot::reuse(std::size_t bytes, int device, StreamHandle stream, std::uint64_t capture) {
  const std::lock_guard lock(mutex_);
  Lent** best = nullptr;
  for (Lent** link = &idle_; *link != nullptr; link = &(*link)->next) {
    const Lent& lent = **link;
    const std::size_t size = lent.buffer.size();
    // Twice the size is too much to hold for it.
    if (lent.capture != capture || lent.device != device || lent.buffer.stream() != stream ||
        size < bytes || size / 2 > bytes) {
      continue;
    }
    if (best == nullptr || size < (*best)->buffer.size()) best = link;
  }
  if (best == nullptr) return nullptr;
  Lent* const lent = *best;
  live_.emplace(lent->buffer.data(), lent);
  *best = lent->next;
  any_idle_ = idle_ != nullptr;
  counts_[device].in_graphs -= lent->buffer.size();
  count_in(*lent);
  return lent;
}

void Slot::deallocate(void* pointer) noexcept {
  if (pointer == nullptr) return;
  Lent* lent = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(pointer);
    if (found == live_.end()) {
      if (!counts_.empty()) ++counts_.begin()->second.foreign_frees;
      return;
    }
    lent = found->second;
    live_.erase(found);
    TorchAllocatorStats& counts = counts_[lent->device];
    counts.current -= lent->buffer.size();
    --counts.allocations;
    if (lent->capture != 0) counts.in_graphs += lent->buffer.size();
  }
  if (lent->capture != 0 && !lent->used_elsewhere &&
      capture_on(lent->device, lent->buffer.stream()) == lent->capture) {
    put_idle(lent);
    return;
  }
  drop(lent);
  settle();
}

void Slot::record_stream(void* pointer, StreamHandle stream) noexcept {
  Lent* lent = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(pointer);
    if (found == live_.end()) return;
    lent = found->second;
  }
  // Whoever calls this holds the memory, so that it is not freed meanwhile; two of them are kept
  // apart by the pool.
  try {
    if (checked_stream(stream) != lent->buffer.stream()) lent->used_elsewhere = true;
    // The pool knows whether the handle is another stream's by now.
    lent->buffer.record_stream(stream);
  } catch (const std::exception& error) {
    fail(lent->buffer.size(), lent->device, error.what());
  }
}

void Slot::empty_cache() noexcept {
  try {
    settle();
    std::vector<std::shared_ptr<MemoryPool>> pools;
    {
      const std::lock_guard lock(mutex_);
      pools = pools_;
    }
    // Not MemoryPool::empty_cache: it may wait for the whole device, and PyTorch also calls this
    // just before a capture on another thread ends.
    for (const auto& pool : pools) pool->trim(0);
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // PyTorch asked for a favour; that it was not possible changes nothing for it.
  }
}

void Slot::set_memory_fraction(double fraction, int device) noexcept {
  try {
    const std::shared_ptr<MemoryPool> pool = pool_for(device);
    const auto total =
        static_cast<double>(DeviceManager::instance().memory_info(pool->device()).total);
    pool->set_limit(static_cast<std::size_t>(std::max(0.0, fraction) * total));
  } catch (const std::exception& error) {
    fail(0, device, error.what());
  }
}

TorchAllocatorStats Slot::stats(std::optional<int> device) {
  settle();
  TorchAllocatorStats sum;
  const std::lock_guard lock(mutex_);
  for (const auto& [index, counts] : counts_) {
    if (device && *device != index) continue;
    sum.current += counts.current;
    sum.peak += counts.peak;
    sum.in_graphs += counts.in_graphs;
    sum.allocations += counts.allocations;
    sum.total_allocations += counts.total_allocations;
    sum.failures += counts.failures;
    sum.foreign_frees += counts.foreign_frees;
  }
  return sum;
}

TorchAllocator::Failure Slot::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, {});
}

void Slot::fail(std::size_t bytes, int device, const char* reason) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    ++counts_[device].failures;
    failure_ = {reason, to_string(DeviceId{DeviceType::kCuda, device}), bytes};
  } catch (...) {
    failure_ = {};
  }
}

// A graph is gone. No pool may be called here: one of its locks may be held by who is waiting.
void Slot::on_graph_gone(void* object) noexcept {
  auto* const lent = static_cast<Lent*>(object);
  if (--lent->holders > 0) return;
  Slot& slot = *lent->slot;
  const std::lock_guard lock(slot.gone_mutex_);
  lent->next = std::exchange(slot.gone_, lent);
  slot.any_gone_ = true;
}

void Slot::drop(Lent* lent) noexcept {
  if (--lent->holders == 0) destroy(lent);
}

void Slot::destroy(Lent* lent) noexcept {
  const std::unique_ptr<Lent> last(lent);  // given back after the lock
  const std::lock_guard lock(mutex_);
  if (lent->capture != 0) counts_[lent->device].in_graphs -= lent->buffer.size();
  --lent_;
}

// Gives back what graphs held that are gone, and ends the reuse within captures that are over.
void Slot::settle() noexcept {
  if (any_idle_) settle_captures();
  if (!any_gone_) return;
  Lent* list = nullptr;
  {
    const std::lock_guard lock(gone_mutex_);
    list = std::exchange(gone_, nullptr);
    any_gone_ = false;
  }
  while (list != nullptr) destroy(std::exchange(list, list->next));
}

void Slot::settle_captures() noexcept {
  Lent* list = nullptr;
  {
    const std::lock_guard lock(mutex_);
    list = std::exchange(idle_, nullptr);
    any_idle_ = false;
  }
  while (list != nullptr) {
    Lent* const lent = std::exchange(list, list->next);
    const bool lasts = capture_on(lent->device, lent->buffer.stream()) == lent->capture;
    lasts ? put_idle(lent) : drop(lent);
  }
}

void Slot::put_idle(Lent* lent) noexcept {
  const std::lock_guard lock(mutex_);
  lent->next = std::exchange(idle_, lent);
  any_idle_ = true;
}

}  // namespace torch_allocator
}  // namespace xpuruntime

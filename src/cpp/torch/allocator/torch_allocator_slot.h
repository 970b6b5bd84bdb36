// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "allocator/torch_allocator.h"
#include "streams/capture_calls.h"

namespace xpuruntime::torch_allocator {

class Slot;

/// One allocation. PyTorch holds it until it frees it, and so does the graph that captured it, if
/// any, until it is gone and has run.
struct Lent {
  Slot* slot = nullptr;
  Buffer buffer;
  int device = 0;
  std::uint64_t capture = 0;     // the capture it was made in; 0 for none
  bool used_elsewhere = false;   // a stream was recorded
  std::atomic<int> holders = 1;  // PyTorch, and the graph
  Lent* next = nullptr;          // among those idle, or those whose graph is gone
};

/// What is behind the functions of one slot. See TorchAllocator.
class Slot {
 public:
  /// Joins those who use the same pools in the same way; false when that is not what it has.
  bool join(const std::vector<std::shared_ptr<MemoryPool>>& pools, TorchAllocator::Failing failing);
  /// Takes a free slot; false when it is not free.
  bool open(const std::vector<std::shared_ptr<MemoryPool>>& pools, TorchAllocator::Failing failing);
  void leave() noexcept;
  bool available();

  /// Throws only under Failing::kThrow.
  void* allocate(std::size_t bytes, int device, StreamHandle stream);
  void deallocate(void* pointer) noexcept;
  void record_stream(void* pointer, StreamHandle stream) noexcept;
  void empty_cache() noexcept;
  void set_memory_fraction(double fraction, int device) noexcept;

  TorchAllocatorStats stats(std::optional<int> device);
  TorchAllocator::Failure take_failure();

 private:
  static void on_graph_gone(void* lent) noexcept;
  std::shared_ptr<MemoryPool> pool_for(int device);
  Lent* lend(std::size_t bytes, int device, StreamHandle stream);
  Lent* reuse(std::size_t bytes, int device, StreamHandle stream, std::uint64_t capture);
  void hand_out(std::unique_ptr<Lent> lent);
  void count_in(const Lent& lent);
  void put_idle(Lent* lent) noexcept;
  void drop(Lent* lent) noexcept;
  void destroy(Lent* lent) noexcept;
  void settle() noexcept;
  void settle_captures() noexcept;
  void fail(std::size_t bytes, int device, const char* reason) noexcept;

  // Neither is held while a pool or CUDA is called, and `gone_mutex_` alone by a graph's end, which
  // may be reported to a thread of CUDA at any time.
  std::mutex mutex_;
  std::mutex gone_mutex_;
  std::size_t users_ = 0;
  std::size_t lent_ = 0;  // those that exist, whoever holds them
  std::vector<std::shared_ptr<MemoryPool>> pools_;
  std::atomic<TorchAllocator::Failing> failing_ = TorchAllocator::Failing::kNull;
  std::unordered_map<void*, Lent*> live_;
  Lent* idle_ = nullptr;  // freed while their capture goes on
  std::atomic<bool> any_idle_ = false;
  std::map<int, TorchAllocatorStats> counts_;  // by device
  TorchAllocator::Failure failure_;
  Lent* gone_ = nullptr;
  std::atomic<bool> any_gone_ = false;
};

}  // namespace xpuruntime::torch_allocator

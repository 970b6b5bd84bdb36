// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/torch_allocator.h"
#include "fake_memory.h"
#include "streams/capture_calls.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::FakeOrder;
using testing::kMiB;
using testing::Ledger;

// What PyTorch keeps: addresses, nothing else.
struct Torch {
  explicit Torch(const TorchAllocator& allocator)
      : alloc_fn(reinterpret_cast<void* (*)(std::size_t, int, void*)>(allocator.alloc_address())),
        free_fn(
            reinterpret_cast<void (*)(void*, std::size_t, int, void*)>(allocator.free_address())),
        record_fn(reinterpret_cast<void (*)(void*, void*)>(allocator.record_stream_address())),
        empty_fn(reinterpret_cast<void (*)()>(allocator.empty_cache_address())) {}

  void* alloc(std::size_t bytes, StreamHandle stream = 0, int device = 0) const {
    void* const pointer = alloc_fn(bytes, device, reinterpret_cast<void*>(stream));
    if (pointer != nullptr) given[pointer] = free_fn;
    return pointer;
  }
  void free(void* pointer) const {
    given.erase(pointer);
    free_fn(pointer, 0, 0, nullptr);
  }
  void record(void* pointer, StreamHandle stream) const {
    record_fn(pointer, reinterpret_cast<void*>(stream));
  }

  void* (*alloc_fn)(std::size_t, int, void*);
  void (*free_fn)(void*, std::size_t, int, void*);
  void (*record_fn)(void*, void*);
  void (*empty_fn)();

  // What a test leaves behind is freed after it.
  static inline std::map<void*, void (*)(void*, std::size_t, int, void*)> given;
};

// Streams that are captured, and what graphs hold.
struct Captures {
  static std::optional<calls::Capture> of(int /*device*/, StreamHandle stream) {
    const auto found = ids.find(stream);
    if (found == ids.end()) return std::nullopt;
    return calls::Capture{found->second, found->second};
  }
  static void keep(int /*device*/, calls::GraphHandle graph, void* object, void (*release)(void*)) {
    if (refuse) throw CudaError("no user objects", "cuda:0", 801);
    held.emplace(graph, std::make_pair(object, release));
  }
  static void destroy(std::uint64_t graph) {
    const auto [first, last] = held.equal_range(graph);
    for (auto it = first; it != last; ++it) it->second.second(it->second.first);
    held.erase(first, last);
  }

  static inline std::map<StreamHandle, std::uint64_t> ids;
  static inline std::multimap<std::uint64_t, std::pair<void*, void (*)(void*)>> held;
  static inline bool refuse = false;
};

class TorchAllocatorTest : public ::testing::Test {
 protected:
  TorchAllocatorTest() : before_(CaptureCalls::instance()) {
    CaptureCalls::instance() = {Captures::of, Captures::keep};
    Captures::ids.clear();
    Captures::refuse = false;
    ledger.order = &order;
    ledger.host = false;
  }
  ~TorchAllocatorTest() override {
    for (const auto& [pointer, free] : std::exchange(Torch::given, {})) {
      free(pointer, 0, 0, nullptr);
    }
    EXPECT_TRUE(Captures::held.empty());
    CaptureCalls::instance() = before_;
  }

  std::shared_ptr<MemoryPool> make(std::optional<std::size_t> limit = {},
                                   std::string_view kind = "caching") {
    const PoolOptions options{.name = "test", .limit = limit};
    return kind == "caching" ? make_caching_pool(kind, fake(ledger), options)
                             : make_plain_pool(kind, fake(ledger), options);
  }

  FakeOrder order;
  Ledger ledger;

 private:
  CaptureCalls before_;
};

constexpr auto kNull = TorchAllocator::Failing::kNull;
constexpr auto kThrow = TorchAllocator::Failing::kThrow;

TEST_F(TorchAllocatorTest, AllocatesFromItsPoolInTheOrderOfTheStream) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kNull);
  const Torch torch(allocator);
  void* const a = torch.alloc(1000, 7);
  void* const b = torch.alloc(2 * kMiB, 7);
  EXPECT_EQ(pool->stats().requested, 1000 + 2 * kMiB);
  EXPECT_EQ(allocator.stats().current, 1000 + 2 * kMiB);
  EXPECT_EQ(allocator.stats().allocations, 2U);
  torch.free(b);
  EXPECT_NE(torch.alloc(2 * kMiB, 8), b);  // work on stream 7 may still use it
  EXPECT_EQ(torch.alloc(2 * kMiB, 7), b);
  torch.free(a);
  torch.free(nullptr);
  EXPECT_EQ(allocator.stats(0).current, 4 * kMiB);
  EXPECT_EQ(allocator.stats(1).current, 0U);
}

TEST_F(TorchAllocatorTest, ARecordedStreamKeepsMemoryFromReuse) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  void* const pointer = torch.alloc(2 * kMiB, 7);
  order.work(9);
  torch.record(pointer, 9);
  torch.free(pointer);
  EXPECT_EQ(pool->stats().pending, 2 * kMiB);
  void* const other = torch.alloc(2 * kMiB, 7);
  EXPECT_NE(other, pointer);
  order.complete(9);
  EXPECT_EQ(torch.alloc(2 * kMiB, 7), pointer);
  torch.free(other);
  torch.free(pointer);
}

TEST_F(TorchAllocatorTest, FailureIsNullOrThrown) {
  const auto pool = make(4 * kMiB);
  TorchAllocator quiet({pool}, kNull);
  EXPECT_EQ(Torch(quiet).alloc(5 * kMiB), nullptr);
  EXPECT_EQ(quiet.stats().failures, 1U);
  const TorchAllocator::Failure failure = quiet.take_failure();
  EXPECT_EQ(failure.requested, 5 * kMiB);
  EXPECT_EQ(failure.device, "cuda:0");
  EXPECT_NE(failure.reason.find("limit 4.00 MiB"), std::string::npos) << failure.reason;
  EXPECT_TRUE(quiet.take_failure().reason.empty());

  TorchAllocator loud({pool}, kThrow);
  EXPECT_NE(loud.slot(), quiet.slot());
  EXPECT_THROW(Torch(loud).alloc(5 * kMiB), OutOfMemoryError);
  EXPECT_THROW(Torch(loud).alloc(100, 2), InputError);  // the per-thread stream
  EXPECT_THROW(Torch(loud).alloc(100, 0, 3), InputError);
  EXPECT_EQ(loud.take_failure().device, "cuda:3");
}

TEST_F(TorchAllocatorTest, MemoryWhoseWorkCouldNotBeMarkedComesBackWhenItIsNeeded) {
  const auto pool = make(4 * kMiB);
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  void* const pointer = torch.alloc(4 * kMiB, 7);
  torch.record(pointer, 9);
  order.refuse_marks = true;
  torch.free(pointer);
  EXPECT_THROW(torch.alloc(4 * kMiB, 7), OutOfMemoryError);
  order.refuse_marks = false;
  void* const again = torch.alloc(4 * kMiB, 7);
  EXPECT_NE(again, nullptr);
  torch.free(again);
}

TEST_F(TorchAllocatorTest, PoolsAreChecked) {
  EXPECT_THROW(TorchAllocator({}, kNull), InputError);
  EXPECT_THROW(TorchAllocator({nullptr}, kNull), InputError);
  EXPECT_THROW(TorchAllocator({make(), make()}, kNull), InputError);
  Ledger host;
  const auto pool = make_caching_pool("caching", fake(host), {.name = "host", .limit = {}});
  EXPECT_THROW(TorchAllocator({pool}, kNull), InputError);
}

TEST_F(TorchAllocatorTest, ThoseOverOnePoolShareASlot) {
  const auto pool = make();
  const std::size_t free = TorchAllocator::available();
  auto first =
      std::make_unique<TorchAllocator>(std::vector<std::shared_ptr<MemoryPool>>{pool}, kNull);
  TorchAllocator second({pool}, kNull);
  EXPECT_EQ(first->slot(), second.slot());
  void* const pointer = Torch(*first).alloc(100);
  EXPECT_EQ(second.stats().allocations, 1U);
  first.reset();
  void* const more = Torch(second).alloc(100);
  EXPECT_NE(more, nullptr);
  Torch(second).free(pointer);
  Torch(second).free(more);
  EXPECT_EQ(TorchAllocator::available(), free - 1);
}

TEST_F(TorchAllocatorTest, SlotsRunOut) {
  std::vector<std::unique_ptr<TorchAllocator>> all;
  std::set<std::uintptr_t> addresses;
  const std::size_t free = TorchAllocator::available();
  for (std::size_t i = 0; i < free; ++i) {
    all.push_back(
        std::make_unique<TorchAllocator>(std::vector<std::shared_ptr<MemoryPool>>{make()}, kNull));
    addresses.insert(all.back()->alloc_address());
  }
  EXPECT_EQ(addresses.size(), kTorchAllocatorSlots);
  EXPECT_THROW(TorchAllocator({make()}, kNull), UnsupportedOperationError);
  all.pop_back();
  EXPECT_NO_THROW(TorchAllocator({make()}, kNull));
  all.clear();
  EXPECT_EQ(TorchAllocator::available(), free);
}

TEST_F(TorchAllocatorTest, TensorsMayOutliveIt) {
  auto pool = make();
  const std::weak_ptr<MemoryPool> watch = pool;
  const std::size_t free = TorchAllocator::available();
  auto allocator = std::make_unique<TorchAllocator>(
      std::vector<std::shared_ptr<MemoryPool>>{std::move(pool)}, kNull);
  const Torch torch(*allocator);
  void* const pointer = torch.alloc(100);
  allocator.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(torch.alloc(100), nullptr);
  EXPECT_EQ(TorchAllocator::available(), free - 1);
  torch.free(pointer);
  torch.free(pointer);  // ignored
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(TorchAllocator::available(), free);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST_F(TorchAllocatorTest, AGraphHoldsWhatItCaptured) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  Captures::ids[7] = 41;
  void* const pointer = torch.alloc(4 * kMiB, 7);
  Captures::ids.clear();
  torch.free(pointer);
  EXPECT_EQ(allocator.stats().current, 0U);
  EXPECT_EQ(allocator.stats().in_graphs, 4 * kMiB);
  EXPECT_EQ(pool->stats().current, 4 * kMiB);
  void* const other = torch.alloc(4 * kMiB, 7);
  EXPECT_NE(other, pointer);
  torch.free(other);
  Captures::destroy(41);
  EXPECT_EQ(allocator.stats().in_graphs, 0U);
  EXPECT_EQ(pool->stats().current, 0U);
}

TEST_F(TorchAllocatorTest, AResultOutlivesItsGraph) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  Captures::ids[7] = 42;
  void* const pointer = torch.alloc(4 * kMiB, 7);
  Captures::ids.clear();
  Captures::destroy(42);
  EXPECT_EQ(allocator.stats().current, 4 * kMiB);
  EXPECT_EQ(pool->stats().current, 4 * kMiB);
  torch.free(pointer);
  EXPECT_EQ(pool->stats().current, 0U);
  EXPECT_EQ(allocator.stats().in_graphs, 0U);
}

TEST_F(TorchAllocatorTest, ACaptureUsesAgainWhatItFreed) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  Captures::ids = {{7, 43}, {8, 43}};
  void* const first = torch.alloc(4 * kMiB, 7);
  torch.free(first);
  EXPECT_NE(torch.alloc(kMiB, 7), first);      // would waste most of it
  EXPECT_NE(torch.alloc(4 * kMiB, 8), first);  // another stream of the capture
  EXPECT_EQ(torch.alloc(3 * kMiB, 7), first);
  EXPECT_EQ(allocator.stats().in_graphs, 0U);
  torch.record(first, 8);
  torch.free(first);
  EXPECT_NE(torch.alloc(4 * kMiB, 7), first);  // work of stream 8 in the graph uses it
  Captures::ids.clear();
  EXPECT_NE(torch.alloc(4 * kMiB, 7), first);
  EXPECT_EQ(pool->stats().requested, 17 * kMiB);
  Captures::destroy(43);
}

TEST_F(TorchAllocatorTest, AnotherCaptureGetsOtherMemory) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  Captures::ids[7] = 44;
  void* const first = torch.alloc(4 * kMiB, 7);
  torch.free(first);
  Captures::ids[7] = 45;
  void* const second = torch.alloc(4 * kMiB, 7);
  EXPECT_NE(second, first);
  torch.free(second);
  Captures::destroy(44);
  Captures::ids.clear();
  Captures::destroy(45);
  EXPECT_EQ(allocator.stats().in_graphs, 0U);
  EXPECT_EQ(pool->stats().current, 0U);
}

TEST_F(TorchAllocatorTest, WhatCannotBeKeptInAGraphIsRefused) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kNull);
  const Torch torch(allocator);
  Captures::ids[7] = 46;
  Captures::refuse = true;
  EXPECT_EQ(torch.alloc(4 * kMiB, 7), nullptr);
  EXPECT_EQ(pool->stats().current, 0U);
  EXPECT_EQ(allocator.stats().current, 0U);

  const auto driver = make({}, "driver");
  TorchAllocator owned({driver}, kNull);
  EXPECT_NE(Torch(owned).alloc(100, 8), nullptr);
  EXPECT_EQ(Torch(owned).alloc(100, 7), nullptr);
  EXPECT_NE(owned.take_failure().reason.find("the graph would own it"), std::string::npos);
}

TEST_F(TorchAllocatorTest, EmptyCacheGivesUnusedMemoryBack) {
  TorchAllocator allocator({make()}, kThrow);
  const Torch torch(allocator);
  torch.free(torch.alloc(4 * kMiB));
  EXPECT_GT(ledger.bytes, 0U);
  torch.empty_fn();
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST_F(TorchAllocatorTest, ManyThreads) {
  const auto pool = make();
  TorchAllocator allocator({pool}, kThrow);
  const Torch torch(allocator);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < 3000; ++i) {
        void* const pointer = torch.alloc_fn(100 + i, 0, nullptr);
        if (i % 100 == 0) torch.empty_fn();
        torch.free_fn(pointer, 0, 0, nullptr);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocator.stats().allocations, 0U);
  EXPECT_EQ(allocator.stats().total_allocations, 12000U);
  EXPECT_EQ(pool->stats().current, 0U);
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/engine_allocator.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::kMiB;
using testing::Ledger;

// What an engine keeps: three addresses, nothing else.
struct Engine {
  explicit Engine(const EngineAllocator& allocator)
      : alloc(reinterpret_cast<void* (*)(std::size_t)>(allocator.alloc_address())),
        free(reinterpret_cast<void (*)(void*)>(allocator.free_address())),
        empty(reinterpret_cast<void (*)()>(allocator.empty_cache_address())) {}
  void* (*alloc)(std::size_t);
  void (*free)(void*);
  void (*empty)();
};

std::shared_ptr<MemoryPool> make(Ledger& ledger, std::optional<std::size_t> limit = {}) {
  return make_caching_pool("caching", fake(ledger), {.name = "test", .limit = limit});
}

TEST(EngineAllocator, AllocatesFromItsPool) {
  Ledger ledger;
  const auto pool = make(ledger);
  EngineAllocator allocator(pool);
  const Engine engine(allocator);
  void* const a = engine.alloc(1000);
  void* const b = engine.alloc(2 * kMiB);
  EXPECT_EQ(pool->stats().requested, 1000 + 2 * kMiB);
  EXPECT_EQ(allocator.stats().current, 1000 + 2 * kMiB);
  EXPECT_EQ(allocator.stats().allocations, 2U);
  engine.free(a);
  engine.free(b);
  engine.free(nullptr);
  EXPECT_EQ(allocator.stats().current, 0U);
  EXPECT_EQ(allocator.stats().peak, 1000 + 2 * kMiB);
  engine.empty();
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(EngineAllocator, FailureIsNullAndRemembered) {
  Ledger ledger;
  EngineAllocator allocator(make(ledger, 4 * kMiB));
  const Engine engine(allocator);
  EXPECT_EQ(engine.alloc(5 * kMiB), nullptr);
  EXPECT_EQ(allocator.stats().failures, 1U);
  const EngineAllocator::Failure failure = allocator.take_failure();
  EXPECT_EQ(failure.requested, 5 * kMiB);
  EXPECT_NE(failure.reason.find("limit 4.00 MiB"), std::string::npos) << failure.reason;
  EXPECT_TRUE(allocator.take_failure().reason.empty());
  void* const works = engine.alloc(kMiB);
  EXPECT_NE(works, nullptr);
  engine.free(works);
}

TEST(EngineAllocator, ForeignAndDoubleFreesAreIgnored) {
  Ledger ledger;
  const auto pool = make(ledger);
  EngineAllocator allocator(pool);
  const Engine engine(allocator);
  void* const pointer = engine.alloc(100);
  int local = 0;
  engine.free(&local);
  engine.free(pointer);
  engine.free(pointer);
  EXPECT_EQ(allocator.stats().foreign_frees, 2U);
  EXPECT_EQ(pool->stats().allocations, 0U);
}

TEST(EngineAllocator, SlotsAreSeparateAndRunOut) {
  Ledger ledger;
  const auto pool = make(ledger);
  std::vector<std::unique_ptr<EngineAllocator>> all;
  std::set<std::uintptr_t> addresses;
  const std::size_t free = EngineAllocator::available();
  for (std::size_t i = 0; i < free; ++i) {
    all.push_back(std::make_unique<EngineAllocator>(pool));
    addresses.insert(all.back()->alloc_address());
  }
  EXPECT_EQ(addresses.size(), kEngineAllocatorSlots);
  EXPECT_THROW(EngineAllocator{pool}, UnsupportedOperationError);
  const Engine first(*all[0]);
  void* const pointer = first.alloc(10);
  EXPECT_EQ(all[0]->stats().allocations, 1U);
  EXPECT_EQ(all[1]->stats().allocations, 0U);
  first.free(pointer);
  all.pop_back();
  EXPECT_NO_THROW(EngineAllocator{pool});
  all.clear();
  EXPECT_EQ(EngineAllocator::available(), free);
  EXPECT_THROW(EngineAllocator{nullptr}, InputError);
}

TEST(EngineAllocator, AnEngineMayOutliveIt) {
  Ledger ledger;
  auto pool = make(ledger);
  const std::weak_ptr<MemoryPool> watch = pool;
  const std::size_t free = EngineAllocator::available();
  auto allocator = std::make_unique<EngineAllocator>(std::move(pool));
  const Engine engine(*allocator);
  void* const pointer = engine.alloc(100);
  allocator.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(engine.alloc(100), nullptr);
  EXPECT_EQ(EngineAllocator::available(), free - 1);
  engine.free(pointer);
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(EngineAllocator::available(), free);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(EngineAllocator, ManyThreadsOnOneSlot) {
  Ledger ledger;
  const auto pool = make(ledger);
  EngineAllocator allocator(pool);
  const Engine engine(allocator);
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < 3000; ++i) {
        void* const pointer = engine.alloc(100 + i);
        if (i % 100 == 0) engine.empty();
        engine.free(pointer);
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

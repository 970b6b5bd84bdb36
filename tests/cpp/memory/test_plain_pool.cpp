// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::FakeOrder;
using testing::kMiB;
using testing::Ledger;

std::shared_ptr<MemoryPool> make(Ledger& ledger, std::optional<std::size_t> limit = {}) {
  return make_plain_pool("direct", fake(ledger), {.name = "test", .limit = limit});
}

TEST(PlainPool, AsksTheDeviceEveryTime) {
  Ledger ledger;
  const auto pool = make(ledger);
  for (int i = 0; i < 3; ++i) std::memset(pool->allocate(1000).data(), 1, 1000);
  EXPECT_EQ(ledger.calls, 3U);
  EXPECT_EQ(ledger.bytes, 0U);
  const MemoryStats stats = pool->stats();
  EXPECT_EQ(stats.peak, 1000U);
  EXPECT_EQ(stats.reserved, 0U);
  EXPECT_EQ(stats.fragmentation(), 0.0);
  EXPECT_NE(pool->allocate(0).data(), nullptr);
}

TEST(PlainPool, KeepsItsLimitExactly) {
  Ledger ledger;
  const auto pool = make(ledger, 1000);
  Buffer all = pool->allocate(1000);
  EXPECT_THROW(pool->allocate(1), OutOfMemoryError);
  all.reset();
  EXPECT_TRUE(pool->allocate(1000));
  EXPECT_THROW(pool->allocate(SIZE_MAX), OutOfMemoryError);
}

TEST(PlainPool, ThreadsDoNotPassTheLimitTogether) {
  Ledger ledger;
  const auto pool = make(ledger, 10 * kMiB);
  std::vector<std::thread> threads;
  std::atomic<bool> passed{false};
  for (int id = 0; id < 8; ++id) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        try {
          const Buffer buffer = pool->allocate(3 * kMiB);
          if (pool->stats().current > 10 * kMiB) passed = true;
        } catch (const OutOfMemoryError&) {
          // Four at a time do not fit.
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(passed);
  EXPECT_EQ(pool->stats().current, 0U);
}

TEST(PlainPool, AFailureLeavesNothingBehind) {
  for (const bool throws : {false, true}) {
    Ledger ledger;
    (throws ? ledger.throw_at : ledger.capacity) = throws ? 1 : 10;
    const auto pool = make(ledger);
    EXPECT_THROW(pool->allocate(kMiB), Error);
    EXPECT_EQ(pool->stats().current, 0U);
    EXPECT_EQ(pool->stats().allocations, 0U);
    EXPECT_TRUE(pool->allocate(5));
  }
}

TEST(PlainPool, FreesBehindRecordedStreams) {
  FakeOrder order;
  Ledger ledger;
  ledger.order = &order;
  const auto pool = make(ledger);
  Buffer buffer = pool->allocate(100, 0x100);
  buffer.record_stream(0x200);
  const std::uint64_t time = order.work(0x200);
  buffer.reset();
  EXPECT_TRUE(order.after(0x100, 0x200, time));
  EXPECT_EQ(order.live_marks(), 0U);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(PlainPool, KeepsWhatCannotBeFreedInOrder) {
  FakeOrder order;
  Ledger ledger;
  ledger.order = &order;
  const auto pool = make(ledger);
  Buffer buffer = pool->allocate(100, 0x100);
  buffer.record_stream(0x200);
  order.refuse_marks = true;
  buffer.reset();
  EXPECT_EQ(ledger.bytes, 100U);
  EXPECT_EQ(pool->stats().pending, 100U);
  EXPECT_EQ(pool->empty_cache(), 0U);
  order.refuse_marks = false;
  EXPECT_EQ(pool->empty_cache(), 100U);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(PlainPool, ABufferOutlivesItsStream) {
  FakeOrder order;
  Ledger ledger;
  ledger.order = &order;
  const auto pool = make(ledger);
  Buffer own = pool->allocate(100, 0x100);
  Buffer used = pool->allocate(100, 0x200);
  used.record_stream(0x100);
  const std::uint64_t time = order.work(0x100);
  pool->retire_stream(0x100);
  order.destroyed[0x100] = true;
  EXPECT_EQ(own.stream(), 0U);
  EXPECT_TRUE(order.after(0, 0x100, time));
  EXPECT_TRUE(order.after(0x200, 0x100, time));
  own.reset();
  used.reset();
  EXPECT_EQ(ledger.bytes, 0U);
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::FakeResource;
using testing::kKiB;
using testing::kMiB;
using testing::Ledger;

std::shared_ptr<MemoryPool> make(Ledger& ledger, std::optional<std::size_t> limit = {}) {
  return make_caching_pool("caching", fake(ledger), {.name = "test", .limit = limit});
}

TEST(CachingPool, GivesAlignedMemoryOfAnySize) {
  Ledger ledger;
  const auto pool = make(ledger);
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, 511 * kKiB, kMiB, kMiB + 1, 20 * kMiB}) {
    const Buffer buffer = pool->allocate(bytes);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0U);
    EXPECT_EQ(buffer.size(), bytes);
    std::memset(buffer.data(), 7, bytes);
  }
}

TEST(CachingPool, UsesAFreedBlockAgain) {
  Ledger ledger;
  const auto pool = make(ledger);
  void* const first = pool->allocate(kMiB).data();
  EXPECT_EQ(pool->allocate(kMiB).data(), first);
  EXPECT_EQ(ledger.calls, 1U);
}

TEST(CachingPool, CountsWhatItSays) {
  Ledger ledger;
  const auto pool = make(ledger);
  Buffer a = pool->allocate(1000);
  Buffer b = pool->allocate(3 * kMiB);
  MemoryStats stats = pool->stats();
  EXPECT_EQ(stats.requested, 1000 + 3 * kMiB);
  EXPECT_EQ(stats.current, 1024 + 3 * kMiB);
  EXPECT_EQ(stats.reserved, 2 * kMiB + 4 * kMiB);
  EXPECT_EQ(stats.reserved, ledger.bytes);
  EXPECT_EQ(stats.cached, stats.reserved - stats.current);
  EXPECT_EQ(stats.largest_free, 2 * kMiB - 1024);
  EXPECT_DOUBLE_EQ(stats.fragmentation(), 1.0 - (2.0 * kMiB - 1024) / (3.0 * kMiB - 1024));
  EXPECT_EQ(stats.allocations, 2U);
  EXPECT_EQ(stats.upstream_allocations, 2U);
  b.reset();
  a.reset();
  stats = pool->stats();
  EXPECT_EQ(stats.requested, 0U);
  EXPECT_EQ(stats.current, 0U);
  EXPECT_EQ(stats.allocations, 0U);
  EXPECT_EQ(stats.total_allocations, 2U);
  EXPECT_EQ(stats.peak, 1024 + 3 * kMiB);
  EXPECT_EQ(stats.largest_free, 4 * kMiB);
  pool->reset_peak();
  EXPECT_EQ(pool->stats().peak, 0U);
}

TEST(CachingPool, JoinsNeighbours) {
  Ledger ledger;
  const auto pool = make(ledger);
  std::vector<Buffer> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(pool->allocate(256 * kKiB));
  EXPECT_EQ(ledger.calls, 1U);
  parts.clear();
  const Buffer a = pool->allocate(kMiB);
  const Buffer b = pool->allocate(kMiB);
  EXPECT_EQ(ledger.calls, 1U);
}

TEST(CachingPool, TrimsToWhatIsAsked) {
  Ledger ledger;
  const auto pool = make(ledger);
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) buffers.push_back(pool->allocate(10 * kMiB));
  buffers.resize(1);
  EXPECT_EQ(pool->trim(20 * kMiB), 10 * kMiB);
  EXPECT_EQ(pool->stats().cached, 20 * kMiB);
  EXPECT_EQ(pool->empty_cache(), 20 * kMiB);
  EXPECT_EQ(ledger.bytes, 10 * kMiB);
  EXPECT_EQ(pool->empty_cache(), 0U);
}

TEST(CachingPool, ALimitBoundsWhatIsHeld) {
  Ledger ledger;
  const auto pool = make(ledger, 11 * kMiB);
  Buffer big = pool->allocate(8 * kMiB);
  Buffer small = pool->allocate(kMiB);
  try {
    pool->allocate(2 * kMiB);
    FAIL() << "no error";
  } catch (const OutOfMemoryError& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.requested(), 2 * kMiB);
    for (const char* part : {"'test'", "2.00 MiB", "9.00 MiB in use", "limit 11.00 MiB"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
  EXPECT_LE(ledger.bytes, 11 * kMiB);
  EXPECT_EQ(pool->stats().failures, 1U);
  big.reset();
  // The freed 8 MiB are given back to make room for another size.
  const Buffer other = pool->allocate(8 * kMiB + 256 * kKiB);
  EXPECT_LE(ledger.bytes, 11 * kMiB);
}

TEST(CachingPool, ASmallLimitIsUsableToItsEnd) {
  Ledger ledger;
  const auto pool = make(ledger, kMiB);
  const Buffer all = pool->allocate(kMiB);
  EXPECT_EQ(ledger.bytes, kMiB);
  EXPECT_THROW(pool->allocate(1), OutOfMemoryError);
}

TEST(CachingPool, SmallSizesMayUseLargeSegmentsBeforeItGivesUp) {
  Ledger ledger;
  const auto pool = make(ledger, 4 * kMiB);
  const Buffer large = pool->allocate(2 * kMiB + 1);
  Buffer half = pool->allocate(kMiB);
  EXPECT_EQ(pool->stats().failures, 0U);
}

TEST(CachingPool, ALowerLimitGivesUnusedMemoryBack) {
  Ledger ledger;
  const auto pool = make(ledger);
  const Buffer kept = pool->allocate(4 * kMiB);
  pool->allocate(30 * kMiB).reset();
  pool->set_limit(8 * kMiB);
  EXPECT_EQ(ledger.bytes, 4 * kMiB);
  EXPECT_EQ(pool->limit(), 8 * kMiB);
  EXPECT_THROW(pool->allocate(6 * kMiB), OutOfMemoryError);
  pool->set_limit({});
  EXPECT_TRUE(pool->allocate(6 * kMiB));
}

TEST(CachingPool, AnExhaustedDeviceGetsTheCacheBackFirst) {
  Ledger ledger;
  ledger.capacity = 16 * kMiB;
  const auto pool = make(ledger);
  pool->allocate(10 * kMiB).reset();
  EXPECT_TRUE(pool->allocate(14 * kMiB));
  EXPECT_THROW(pool->allocate(20 * kMiB), OutOfMemoryError);
  EXPECT_TRUE(pool->allocate(14 * kMiB));
}

TEST(CachingPool, RefusesSizesThatNoMemoryHas) {
  Ledger ledger;
  const auto pool = make(ledger);
  EXPECT_THROW(pool->allocate(SIZE_MAX), OutOfMemoryError);
  EXPECT_THROW(pool->allocate(SIZE_MAX / 2), OutOfMemoryError);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(CachingPool, BuffersKeepThePoolAlive) {
  Ledger ledger;
  auto pool = make(ledger);
  const std::weak_ptr<MemoryPool> watch = pool;
  Buffer buffer = pool->allocate(100);
  pool.reset();
  std::memset(buffer.data(), 1, 100);
  EXPECT_FALSE(watch.expired());
  buffer.reset();
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(CachingPool, AMovedFromBufferIsEmpty) {
  Ledger ledger;
  const auto pool = make(ledger);
  Buffer a = pool->allocate(100);
  Buffer b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): that is what is tested
  EXPECT_TRUE(b);
  b = pool->allocate(200);
  EXPECT_EQ(pool->stats().allocations, 1U);
}

// Whatever call to the device fails, by nullptr or by exception: nothing is lost, and the pool
// works on.
TEST(CachingPool, SurvivesAFailureOfEveryCall) {
  const auto work = [](MemoryPool& pool) {
    std::vector<Buffer> buffers;
    for (std::size_t i = 0; i < 40; ++i) {
      try {
        buffers.push_back(pool.allocate((i * 37 % 11 + 1) * 300 * kKiB));
        std::memset(buffers.back().data(), 1, buffers.back().size());
      } catch (const Error&) {
        // Injected.
      }
      if (i % 3 == 0 && !buffers.empty()) buffers.erase(buffers.begin());
    }
  };
  for (const bool throws : {false, true}) {
    for (std::size_t k = 1;; ++k) {
      Ledger ledger;
      bool reached = false;
      (throws ? ledger.throw_at : ledger.fail_at) = k;
      {
        const auto pool = make(ledger);
        work(*pool);
        reached = ledger.calls >= k;
        ledger.fail_at = ledger.throw_at = 0;
        const MemoryStats stats = pool->stats();
        ASSERT_EQ(stats.current, 0U) << k;
        ASSERT_EQ(stats.reserved, ledger.bytes) << k;
        ASSERT_TRUE(pool->allocate(5 * kMiB)) << k;
        pool->empty_cache();
        ASSERT_EQ(ledger.bytes, 0U) << k;
      }
      ASSERT_EQ(ledger.bytes, 0U) << k;
      if (!reached) break;
    }
  }
  EXPECT_EQ(FakeResource::wrong_frees, 0);
}

TEST(CachingPool, DoesNotGrowOverAMillionRounds) {
  Ledger ledger;
  const auto pool = make(ledger);
  std::vector<Buffer> window(16);
  std::mt19937 random(3);
  const std::size_t sizes[] = {100, 4000, 70 * kKiB, kMiB, 3 * kMiB};
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) window[random() % 16] = pool->allocate(sizes[random() % 5]);
  };
  rounds(100000);
  const std::size_t held = ledger.bytes;
  rounds(1000000);
  EXPECT_LE(ledger.bytes, held + held / 4);
  window.clear();
  pool->empty_cache();
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(CachingPool, NeverGivesTheSameBytesTwice) {
  Ledger ledger;
  const auto pool = make(ledger, 64 * kMiB);
  std::mt19937 random(5);
  std::vector<std::pair<Buffer, unsigned char>> live;
  const auto intact = [](const auto& entry) {
    const auto* bytes = static_cast<const unsigned char*>(entry.first.data());
    const std::size_t size = entry.first.size();
    return size == 0 || (bytes[0] == entry.second && bytes[size / 2] == entry.second &&
                         bytes[size - 1] == entry.second);
  };
  int refused = 0;
  for (int step = 0; step < 30000; ++step) {
    if (random() % 100 < 52) {
      const std::size_t bytes = random() % (std::size_t{1} << (random() % 23));
      const auto mark = static_cast<unsigned char>(random());
      try {
        live.emplace_back(pool->allocate(bytes), mark);
        std::memset(live.back().first.data(), mark, bytes);
      } catch (const OutOfMemoryError&) {
        ++refused;
        live.resize(live.size() / 2);
      }
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      ASSERT_TRUE(intact(live.back()));
      live.pop_back();
    }
    if (step % 5000 == 0) pool->trim(8 * kMiB);
    const MemoryStats stats = pool->stats();
    ASSERT_LE(stats.reserved, 64 * kMiB);
    ASSERT_EQ(stats.reserved, ledger.bytes);
    ASSERT_LE(stats.largest_free, stats.cached);
    ASSERT_LE(stats.requested, stats.current);
  }
  EXPECT_GT(refused, 0);
  for (const auto& entry : live) ASSERT_TRUE(intact(entry));
}

TEST(CachingPool, ManyThreadsOnOnePool) {
  Ledger ledger;
  const auto pool = make(ledger, 256 * kMiB);
  std::vector<std::thread> threads;
  std::atomic<int> damaged{0};
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<Buffer> mine(8);
      for (int i = 0; i < 5000; ++i) {
        Buffer& slot = mine[random() % 8];
        if (slot && *static_cast<unsigned*>(slot.data()) != seed) ++damaged;
        slot = pool->allocate(4 + random() % (256 * kKiB));
        *static_cast<unsigned*>(slot.data()) = seed;
        if (i % 500 == 0) pool->trim(0);
        if (i % 700 == 0) (void)pool->stats();
        if (Buffer quick = pool->try_allocate(4096)) *static_cast<unsigned*>(quick.data()) = 99;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(pool->stats().current, 0U);
  EXPECT_EQ(pool->stats().allocations, 0U);
}

TEST(CachingPool, ThreadsHandBuffersToEachOther) {
  Ledger ledger;
  const auto pool = make(ledger);
  std::mutex mutex;
  std::vector<Buffer> shared;
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (int i = 0; i < 5000; ++i) {
        Buffer buffer = pool->allocate(static_cast<std::size_t>(1000 * (id + 1)));
        Buffer other;
        const std::lock_guard lock(mutex);
        shared.push_back(std::move(buffer));
        if (shared.size() > 20) {
          other = std::move(shared.front());
          shared.erase(shared.begin());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  shared.clear();
  EXPECT_EQ(pool->stats().current, 0U);
}

}  // namespace
}  // namespace xpuruntime

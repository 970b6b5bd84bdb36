// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::FakeOrder;
using testing::FakeResource;
using testing::kMiB;
using testing::Ledger;

/// A call to the device that stays inside until it is let go.
class Gate {
 public:
  void enter() {
    std::unique_lock lock(mutex_);
    ++entered_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void wait_for_entry() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return entered_ > 0; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int entered_ = 0;
  bool open_ = false;
};

std::shared_ptr<MemoryPool> make(Ledger& ledger, std::optional<std::size_t> limit = {}) {
  return make_caching_pool("caching", fake(ledger), {.name = "test", .limit = limit});
}

TEST(CachingPoolThreads, TheCacheServesWhileTheDeviceIsAskedForMemory) {
  Ledger ledger;
  const auto pool = make(ledger);
  pool->allocate(kMiB).reset();
  Gate gate;
  ledger.before_allocate = [&] { gate.enter(); };
  std::thread grows([&] { EXPECT_TRUE(pool->allocate(8 * kMiB)); });
  gate.wait_for_entry();
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(pool->allocate(kMiB));
    EXPECT_TRUE(pool->try_allocate(kMiB));
  }
  const MemoryStats stats = pool->stats();
  EXPECT_EQ(stats.current, 0U);
  EXPECT_EQ(stats.reserved, 2 * kMiB);  // not yet the 8 MiB
  gate.open();
  grows.join();
  EXPECT_EQ(pool->stats().reserved, ledger.bytes);
}

TEST(CachingPoolThreads, TheCacheServesWhileMemoryIsGivenBack) {
  Ledger ledger;
  const auto pool = make(ledger);
  const Buffer kept = pool->allocate(kMiB);
  pool->allocate(8 * kMiB).reset();
  Gate gate;
  ledger.before_free = [&] { gate.enter(); };
  std::thread trims([&] { EXPECT_EQ(pool->trim(0), 8 * kMiB); });
  gate.wait_for_entry();
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(pool->allocate(kMiB));
  EXPECT_EQ(pool->stats().reserved, 10 * kMiB);  // held until the device has it
  gate.open();
  trims.join();
  EXPECT_EQ(pool->stats().reserved, 2 * kMiB);
  EXPECT_EQ(pool->stats().reserved, ledger.bytes);
}

TEST(CachingPoolThreads, WhoWaitsForTheDeviceTakesWhatTheOneBeforeLeft) {
  Ledger ledger;
  const auto pool = make(ledger, 2 * kMiB);  // one segment: a second would pass the limit
  Gate gate;
  ledger.before_allocate = [&] { gate.enter(); };
  std::optional<Buffer> first;
  std::optional<Buffer> second;
  std::thread grows([&] { first = pool->allocate(kMiB); });
  gate.wait_for_entry();
  std::thread waits([&] { second = pool->allocate(kMiB); });
  gate.open();
  grows.join();
  waits.join();
  EXPECT_TRUE(first && *first && second && *second);
  EXPECT_EQ(ledger.calls, 1U);
  EXPECT_EQ(pool->stats().failures, 0U);
}

TEST(CachingPoolThreads, NoneIsOutOfMemoryWhileAnotherGivesSomeBack) {
  Ledger ledger;
  ledger.capacity = 16 * kMiB;
  const auto pool = make(ledger);
  pool->allocate(12 * kMiB).reset();
  Gate gate;
  ledger.before_free = [&] { gate.enter(); };
  std::thread trims([&] { pool->empty_cache(); });
  gate.wait_for_entry();
  std::optional<Buffer> other;
  std::thread asks([&] { other = pool->allocate(14 * kMiB); });
  gate.open();
  trims.join();
  asks.join();
  EXPECT_TRUE(other && *other);
  EXPECT_EQ(pool->stats().failures, 0U);
}

TEST(CachingPoolThreads, AStreamMayBeRetiredWhileItsAllocationAsksTheDevice) {
  FakeOrder order;
  Ledger ledger;
  ledger.order = &order;
  ledger.host = false;
  const auto pool = make(ledger);
  Gate gate;
  ledger.before_allocate = [&] { gate.enter(); };
  std::optional<Buffer> buffer;
  std::thread grows([&] { buffer = pool->allocate(3 * kMiB, 7); });
  gate.wait_for_entry();
  pool->retire_stream(7);
  gate.open();
  grows.join();
  buffer.reset();
  EXPECT_EQ(pool->empty_cache(), 4 * kMiB);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(CachingPoolThreads, AFailingCallToTheDeviceLeavesTheLockAsItWas) {
  Ledger ledger;
  const auto pool = make(ledger);
  ledger.throw_at = 1;
  EXPECT_THROW(pool->allocate(kMiB), CudaError);
  EXPECT_EQ(pool->stats().upstream_allocations, 1U);
  EXPECT_TRUE(pool->allocate(kMiB));
  EXPECT_EQ(pool->stats().reserved, ledger.bytes);
}

TEST(CachingPoolThreads, ThreadsThatGrowShrinkAndFailTogetherLoseNothing) {
  Ledger ledger;
  ledger.capacity = 96 * kMiB;
  const auto pool = make(ledger, 80 * kMiB);
  std::atomic<int> damaged{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<Buffer> live;
      for (int step = 0; step < 1500; ++step) {
        const std::size_t bytes = 1 + random() % (std::size_t{1} << (10 + random() % 15));
        try {
          live.push_back(pool->allocate(bytes));
          std::memset(live.back().data(), static_cast<int>(seed + 1),
                      std::min<std::size_t>(bytes, 64));
        } catch (const OutOfMemoryError&) {
          live.clear();
        }
        if (live.size() > 6) {
          const auto* bytes_of = static_cast<const unsigned char*>(live.front().data());
          if (bytes_of[0] != seed + 1) ++damaged;
          live.erase(live.begin());
        }
        switch (random() % 40) {
          case 0:
            pool->trim(random() % (32 * kMiB));
            break;
          case 1:
            pool->empty_cache();
            break;
          case 2:
            pool->set_limit((random() % 40 + 40) * kMiB);
            break;
          default:
            break;
        }
        if (pool->stats().reserved > 96 * kMiB) over = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_FALSE(over);
  const MemoryStats stats = pool->stats();
  EXPECT_EQ(stats.current, 0U);
  EXPECT_EQ(stats.reserved, ledger.bytes);
  pool->empty_cache();
  EXPECT_EQ(ledger.bytes, 0U);
  EXPECT_EQ(FakeResource::wrong_frees, 0);
}

/// An order whose waits can be held, and whose events say when they are used after their end.
class HeldOrder final : public StreamOrder {
 public:
  Event record(StreamHandle /*stream*/) noexcept override {
    ++live;
    return ++last_;
  }
  bool finished(Event /*event*/) noexcept override { return done; }
  bool wait(StreamHandle /*stream*/, Event /*event*/) noexcept override { return true; }
  bool synchronize(Event /*event*/) noexcept override { return wait_here(); }
  bool synchronize_all() noexcept override { return wait_here(); }
  void destroy(Event /*event*/) noexcept override { --live; }

  Gate gate;
  std::atomic<bool> done{false};
  std::atomic<int> live{0};

 private:
  bool wait_here() noexcept {
    gate.enter();
    done = true;
    return true;
  }

  std::atomic<Event> last_{0};
};

class OrderedResource final : public MemoryResource {
 public:
  OrderedResource(Ledger& ledger, StreamOrder& order) : inner_(fake(ledger)), order_(order) {}
  DeviceId device() const noexcept override { return {DeviceType::kCuda, 0}; }
  bool host_accessible() const noexcept override { return false; }
  StreamOrder* order() noexcept override { return &order_; }
  MemoryInfo memory_info() noexcept override { return {}; }
  void* allocate(std::size_t bytes, StreamHandle stream) override {
    return inner_->allocate(bytes, stream);
  }
  void deallocate(void* pointer, std::size_t bytes, StreamHandle stream) noexcept override {
    inner_->deallocate(pointer, bytes, stream);
  }

 private:
  std::unique_ptr<MemoryResource> inner_;
  StreamOrder& order_;
};

TEST(CachingPoolThreads, TheCacheServesWhileAnotherThreadWaitsForWorkOfStreams) {
  Ledger ledger;
  HeldOrder order;
  {
    const auto pool = make_caching_pool("caching", std::make_unique<OrderedResource>(ledger, order),
                                        {.name = "test", .limit = 6 * kMiB});
    const Buffer kept = pool->allocate(kMiB / 2, 5);  // so that its segment stays
    Buffer used = pool->allocate(4 * kMiB, 5);
    used.record_stream(6);
    used.reset();  // pending until the work of stream 6 is done
    EXPECT_EQ(pool->stats().pending, 4 * kMiB);
    std::optional<Buffer> other;
    std::thread asks([&] { other = pool->allocate(4 * kMiB, 5); });
    order.gate.wait_for_entry();
    // Its bytes count as pending all the while, and more may become pending.
    EXPECT_EQ(pool->stats().pending, 4 * kMiB);
    Buffer more = pool->allocate(kMiB / 2, 5);
    more.record_stream(6);
    more.reset();
    EXPECT_TRUE(pool->allocate(kMiB / 4, 5));
    order.gate.open();
    asks.join();
    EXPECT_TRUE(other && *other);
  }
  EXPECT_EQ(order.live, 0);
  EXPECT_EQ(ledger.bytes, 0U);
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

using testing::fake;
using testing::FakeOrder;
using testing::kKiB;
using testing::kMiB;
using testing::Ledger;

constexpr StreamHandle kA = 0x100;
constexpr StreamHandle kB = 0x200;

class CachingPoolStreams : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryPool> make(std::optional<std::size_t> limit = {}, bool host = false) {
    ledger.order = &order;
    ledger.host = host;
    return make_caching_pool(host ? "pinned" : "caching", fake(ledger),
                             {.name = "test", .limit = limit});
  }
  FakeOrder order;
  Ledger ledger;
};

TEST_F(CachingPoolStreams, TheSameStreamGetsTheBlockAtOnce) {
  const auto pool = make();
  void* const first = pool->allocate(kMiB, kA).data();
  order.work(kA);
  EXPECT_EQ(pool->allocate(kMiB, kA).data(), first);
  EXPECT_EQ(order.records, 0);
}

TEST_F(CachingPoolStreams, AnotherStreamGetsMemoryOfItsOwn) {
  const auto pool = make();
  void* const first = pool->allocate(kMiB, kA).data();
  EXPECT_NE(pool->allocate(kMiB, kB).data(), first);
  EXPECT_EQ(order.waits, 0);
}

TEST_F(CachingPoolStreams, UnderALimitAnAdoptedStreamLendsBehindAnEvent) {
  const auto pool = make(2 * kMiB);
  pool->adopt_stream(kA);
  const Buffer other = pool->allocate(kMiB, kA);
  void* const first = pool->allocate(kMiB, kA).data();
  const std::uint64_t time = order.work(kA);
  EXPECT_EQ(pool->allocate(kMiB, kB).data(), first);
  EXPECT_EQ(order.waits, 1);
  EXPECT_TRUE(order.after(kB, kA, time));
}

TEST_F(CachingPoolStreams, AnUnknownStreamLendsNothing) {
  const auto pool = make(2 * kMiB);
  pool->allocate(kMiB, kA).reset();
  const Buffer other = pool->allocate(kMiB, kA);
  EXPECT_THROW(pool->allocate(kMiB, kB), OutOfMemoryError);
  EXPECT_EQ(order.records, 0);
}

TEST_F(CachingPoolStreams, ARecordedStreamHoldsTheBlockBack) {
  const auto pool = make();
  Buffer buffer = pool->allocate(kMiB, kA);
  void* const first = buffer.data();
  buffer.record_stream(kB);
  buffer.record_stream(kB);
  order.work(kB);
  buffer.reset();
  EXPECT_EQ(order.records, 1);
  EXPECT_EQ(pool->stats().pending, kMiB);
  EXPECT_NE(pool->allocate(kMiB, kA).data(), first);
  pool->empty_cache();
  Buffer again = pool->allocate(kMiB, kA);
  again.record_stream(kB);
  void* const second = again.data();
  again.reset();
  order.complete(kB);
  EXPECT_EQ(pool->allocate(kMiB, kA).data(), second);
  EXPECT_EQ(pool->stats().pending, 0U);
  EXPECT_EQ(order.live_marks(), 0U);
}

TEST_F(CachingPoolStreams, BeforeOutOfMemoryItWaitsForMarks) {
  const auto pool = make(2 * kMiB);
  Buffer buffer = pool->allocate(2 * kMiB, kA);
  buffer.record_stream(kB);
  order.work(kB);
  buffer.reset();
  EXPECT_TRUE(pool->allocate(2 * kMiB, kA));
  EXPECT_GT(order.synchronizations, 0);
}

TEST_F(CachingPoolStreams, AMarkThatCannotBeSetHoldsTheBlockUntilTheDeviceIsIdle) {
  const auto pool = make();
  Buffer buffer = pool->allocate(kMiB, kA);
  buffer.record_stream(kB);
  order.refuse_marks = true;
  buffer.reset();
  EXPECT_EQ(pool->empty_cache(), 0U);
  EXPECT_EQ(pool->stats().pending, kMiB);
  order.refuse_marks = false;
  EXPECT_EQ(pool->empty_cache(), 2 * kMiB);
}

TEST_F(CachingPoolStreams, ARetiredStreamLeavesItsMemoryToAll) {
  const auto pool = make();
  void* const first = pool->allocate(kMiB, kA).data();
  order.work(kA);
  pool->retire_stream(kA);
  order.destroyed[kA] = true;
  EXPECT_NE(pool->allocate(kMiB, kB).data(), first);  // its work is not done
  order.complete(kA);
  std::vector<Buffer> got;
  bool found = false;
  for (int i = 0; i < 4; ++i) {
    got.push_back(pool->allocate(kMiB, kB));
    found |= got.back().data() == first;
  }
  EXPECT_TRUE(found);
}

TEST_F(CachingPoolStreams, ABufferOutlivesItsStream) {
  const auto pool = make();
  Buffer buffer = pool->allocate(kMiB, kA);
  Buffer used = pool->allocate(kMiB, kB);
  used.record_stream(kA);
  order.work(kA);
  pool->retire_stream(kA);
  order.destroyed[kA] = true;
  const int records = order.records;
  buffer.reset();
  used.reset();
  EXPECT_EQ(order.records, records);  // nothing touches the destroyed stream
  EXPECT_EQ(pool->stats().pending, kMiB);
  // A new stream with the old handle has a new home, and does not inherit the old stream's memory
  // early.
  order.destroyed[kA] = false;
  order.complete(kA);
  EXPECT_TRUE(pool->allocate(kMiB, kA));
  pool->empty_cache();
  EXPECT_EQ(ledger.bytes, 0U);
  EXPECT_EQ(order.live_marks(), 0U);
}

TEST_F(CachingPoolStreams, OneLegacyStreamAndNoPerThreadStream) {
  const auto pool = make();
  void* const first = pool->allocate(kMiB, 0).data();
  EXPECT_EQ(pool->allocate(kMiB, 1).data(), first);
  EXPECT_THROW(pool->allocate(kMiB, 2), InputError);
  EXPECT_FALSE(pool->try_allocate(kMiB, 2));
  Buffer buffer = pool->allocate(kMiB);
  EXPECT_THROW(buffer.record_stream(2), InputError);
}

TEST_F(CachingPoolStreams, PinnedMemoryWaitsForItsOwnStream) {
  const auto pool = make({}, true);
  Buffer buffer = pool->allocate(kMiB, kA);
  void* const first = buffer.data();
  order.work(kA);
  buffer.reset();
  EXPECT_NE(pool->allocate(kMiB, kA).data(), first);
  order.complete(kA);
  std::vector<Buffer> got;
  bool found = false;
  for (int i = 0; i < 4; ++i) {
    got.push_back(pool->allocate(kMiB, kB));
    found |= got.back().data() == first;
  }
  EXPECT_TRUE(found);
}

// Random work on several streams, some destroyed on the way. The clock decides whether each reuse
// was allowed.
class Oracle {
 public:
  Oracle(FakeOrder& order, bool host) : order_(order), host_(host) {}

  void use(const Buffer& buffer, StreamHandle stream) {
    each_unit(buffer, [&](auto unit) { uses_[unit].emplace_back(stream, order_.work(stream)); });
  }

  // Freeing device memory waits for the device, so what was there before does not matter any more.
  void forget(void* pointer, std::size_t bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(pointer);
    uses_.erase(uses_.lower_bound(first), uses_.lower_bound(first + bytes));
  }

  bool allowed(const Buffer& buffer, StreamHandle stream) {
    bool good = true;
    each_unit(buffer, [&](auto unit) {
      for (const auto& [other, time] : uses_[unit]) {
        good &= host_ ? order_.done(other, time) : order_.after(stream, other, time);
      }
      uses_[unit].clear();
    });
    return good;
  }

 private:
  template <typename Visit>
  static void each_unit(const Buffer& buffer, Visit visit) {
    const auto first = reinterpret_cast<std::uintptr_t>(buffer.data());
    for (std::uintptr_t at = first; at < first + buffer.size(); at += 512) visit(at);
  }

  FakeOrder& order_;
  const bool host_;
  std::map<std::uintptr_t, std::vector<std::pair<StreamHandle, std::uint64_t>>> uses_;
};

void random_work(FakeOrder& order, Ledger& ledger, MemoryPool& pool, bool host) {
  std::mt19937 random(11);
  Oracle oracle(order, host);
  ledger.on_free = [&](void* pointer, std::size_t bytes) { oracle.forget(pointer, bytes); };
  const std::shared_ptr<void> detach(nullptr, [&](void*) { ledger.on_free = nullptr; });
  std::vector<StreamHandle> streams{0, 0x100, 0x200, 0x300};
  StreamHandle next = 0x400;
  for (const StreamHandle stream : streams) pool.adopt_stream(stream);
  std::vector<Buffer> live;
  int refused = 0;
  for (int step = 0; step < 20000; ++step) {
    const StreamHandle stream = streams[random() % streams.size()];
    if (random() % 2 == 0 || live.empty()) {
      try {
        const std::size_t most =
            random() % 50 == 0 ? 2 * kMiB : std::size_t{1} << (10 + random() % 8);
        live.push_back(pool.allocate(1 + random() % most, stream));
        ASSERT_TRUE(oracle.allowed(live.back(), stream)) << "step " << step;
        oracle.use(live.back(), stream);
      } catch (const OutOfMemoryError&) {
        ++refused;
        live.resize(live.size() / 2);
      }
    } else {
      std::swap(live[random() % live.size()], live.back());
      if (random() % 4 == 0) {
        live.back().record_stream(stream);
        oracle.use(live.back(), stream);
      } else {
        live.pop_back();
      }
    }
    if (random() % 16 == 0) order.complete(stream);
    if (random() % 200 == 0) pool.trim(random() % (4 * kMiB));
    if (random() % 500 == 0 && stream != 0) {
      pool.retire_stream(stream);
      order.destroyed[stream] = true;
      std::replace(streams.begin(), streams.end(), stream, next);
      pool.adopt_stream(next);
      next += 0x100;
    }
  }
  EXPECT_GT(refused, 0);
  live.clear();
  pool.empty_cache();
  EXPECT_EQ(pool.stats().reserved, 0U);
  EXPECT_EQ(order.live_marks(), 0U);
}

// A buffer that outlives its stream, and another stream.
class CachingPoolDestroyedStream : public CachingPoolStreams {
 protected:
  void SetUp() override {
    pool = make(8 * kMiB);
    pool->adopt_stream(kA);
    pool->adopt_stream(kB);
    buffer = pool->allocate(2 * kMiB, kA);
    memory = buffer.data();
  }

  std::shared_ptr<MemoryPool> pool;
  Buffer buffer;
  const void* memory = nullptr;
};

TEST_F(CachingPoolDestroyedStream, WorkOnANewOneWithItsHandleIsWaitedFor) {
  order.work(kA);
  order.complete(kA);
  pool->retire_stream(kA);
  pool->adopt_stream(kA);  // CUDA gives the handle to a new stream
  const auto work = order.work(kA);
  buffer.record_stream(kA);
  buffer.reset();
  const Buffer next = pool->allocate(2 * kMiB, kB);
  EXPECT_TRUE(next.data() != memory || order.after(kB, kA, work));
}

TEST_F(CachingPoolDestroyedStream, ItsBlocksAreLikeOthersWhenTheyAreUsedAgain) {
  pool->retire_stream(kA);
  buffer.reset();
  Buffer again = pool->allocate(2 * kMiB, kB);
  ASSERT_EQ(again.data(), memory);
  const int marks = order.records;
  again.record_stream(kB);
  again.reset();
  EXPECT_EQ(order.records, marks);
}

TEST_F(CachingPoolStreams, RandomWorkNeverReusesTooEarly) {
  const auto pool = make(8 * kMiB);
  random_work(order, ledger, *pool, false);
  EXPECT_GT(order.waits, 0);
}

TEST_F(CachingPoolStreams, RandomWorkOnPinnedMemoryNeverReusesTooEarly) {
  const auto pool = make(8 * kMiB, true);
  random_work(order, ledger, *pool, true);
}

}  // namespace
}  // namespace xpuruntime

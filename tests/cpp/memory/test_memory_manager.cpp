// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/runtime.h"

namespace xpuruntime {
namespace {

constexpr DeviceId kCpu{};

TEST(MemoryManager, KnowsTheLivePools) {
  MemoryManager manager;
  auto a = manager.make_pool(kCpu, "caching", {.name = "a", .limit = {}});
  auto b = manager.make_pool(kCpu, "direct");
  EXPECT_EQ(b->name(), "direct@cpu");
  const Buffer x = a->allocate(1000);
  Buffer y = b->allocate(500);
  EXPECT_EQ(manager.get_allocated_size(), 1024U + 500U);
  EXPECT_EQ(manager.get_stats(kCpu).allocations, 2U);
  EXPECT_EQ(manager.get_allocated_size(DeviceId{DeviceType::kCuda, 0}), 0U);
  b.reset();
  EXPECT_EQ(manager.pools().size(), 2U);  // a buffer keeps it alive
  y.reset();
  ASSERT_EQ(manager.pools().size(), 1U);
  EXPECT_EQ(manager.pools()[0]->name(), "a");
}

TEST(MemoryManager, EmptiesEveryCache) {
  MemoryManager manager;
  const auto a = manager.make_pool(kCpu, "caching");
  const auto b = manager.make_pool(kCpu, "caching");
  a->allocate(100).reset();
  b->allocate(100).reset();
  EXPECT_EQ(manager.empty_cache(), std::size_t{4} << 20);
  EXPECT_EQ(manager.get_stats().reserved, 0U);
}

TEST(MemoryManager, HasOneDefaultPoolADevice) {
  MemoryManager manager;
  std::vector<std::shared_ptr<MemoryPool>> got(8);
  std::vector<std::thread> threads;
  for (auto& slot : got) threads.emplace_back([&] { slot = manager.default_pool(kCpu); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& pool : got) EXPECT_EQ(pool, got[0]);
}

TEST(MemoryManager, RefusesWhatIsNotThere) {
  MemoryManager manager;
  EXPECT_THROW(manager.make_pool(kCpu, "arena"), InputError);
  EXPECT_THROW(manager.make_pool(kCpu, "driver"), UnsupportedOperationError);
  EXPECT_THROW(manager.make_pool(kCpu, "pinned"), UnsupportedOperationError);
  EXPECT_THROW(manager.make_pool({DeviceType::kCuda, 99}, "caching"), CudaError);
  EXPECT_THROW(manager.make_pool({DeviceType::kCuda, -1}, "caching"), InputError);
  EXPECT_TRUE(manager.pools().empty());
}

TEST(MemoryManager, ReportsWhileThreadsMakePools) {
  MemoryManager manager;
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const auto pool = manager.make_pool(kCpu, "caching");
        const Buffer buffer = pool->allocate(1000);
        (void)manager.get_stats();
        (void)manager.empty_cache();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(manager.get_allocated_size(), 0U);
}

TEST(Runtime, OwnsManagersOfItsOwn) {
  Runtime runtime;
  EXPECT_NE(&runtime.memory(), &MemoryManager::instance());
  EXPECT_EQ(&Runtime::instance().memory(), &MemoryManager::instance());
  EXPECT_EQ(&Runtime::instance().devices(), &DeviceManager::instance());
}

}  // namespace
}  // namespace xpuruntime

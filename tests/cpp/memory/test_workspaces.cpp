// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime {
namespace {

TEST(Workspaces, GivesGrowsAndKeeps) {
  MemoryManager memory;
  Workspaces workspaces(memory);
  EXPECT_EQ(workspaces.get({}, 0, 0).data(), nullptr);
  EXPECT_EQ(workspaces.bytes(), 0U);
  void* first = nullptr;
  {
    const auto lease = workspaces.get({}, 0, 1000);
    first = lease.data();
    ASSERT_NE(first, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 256, 0U);
    std::memset(first, 1, 1000);
  }
  EXPECT_EQ(workspaces.get({}, 0, 10).data(), first);
  EXPECT_EQ(workspaces.get({}, 0, 1000).data(), first);
  EXPECT_EQ(workspaces.bytes(), 1000U);
  std::memset(workspaces.get({}, 0, 1 << 20).data(), 1, 1 << 20);
  EXPECT_EQ(workspaces.bytes(), std::size_t{1} << 20);
  EXPECT_EQ(memory.get_allocated_size({}), std::size_t{1} << 20) << "the smaller one went back";
  workspaces.clear();
  EXPECT_EQ(workspaces.bytes(), 0U);
  EXPECT_EQ(memory.get_allocated_size({}), 0U);
}

TEST(Workspaces, AFailureLeavesWhatWasThere) {
  MemoryManager memory;
  Workspaces workspaces(memory);
  void* const first = workspaces.get({}, 0, 1000).data();
  memory.default_pool({})->set_limit(std::size_t{2} << 20);
  EXPECT_THROW((void)workspaces.get({}, 0, 8 << 20), OutOfMemoryError);
  EXPECT_EQ(workspaces.get({}, 0, 1000).data(), first);
}

TEST(Workspaces, OnTheCpuEveryThreadHasItsOwn) {
  MemoryManager memory;
  Workspaces workspaces(memory);
  const auto lease = workspaces.get({}, 0, 100);
  std::vector<std::thread> threads;
  std::atomic<int> different{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 100; ++turn) {
        const auto mine = workspaces.get({}, 0, 100 + static_cast<std::size_t>(turn));
        std::memset(mine.data(), i, 100);
        std::this_thread::yield();
        if (static_cast<char*>(mine.data())[99] == i && mine.data() != lease.data()) ++different;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 800);
  EXPECT_EQ(workspaces.bytes(), 100U) << "blocks go with their threads";
}

TEST(Workspaces, WhatIsInUseIsNotCleared) {
  MemoryManager memory;
  Workspaces workspaces(memory);
  const auto lease = workspaces.get({}, 0, 100);
  std::thread([&] { workspaces.clear(); }).join();
  EXPECT_EQ(workspaces.bytes(), 100U);
  std::memset(lease.data(), 1, 100);
}

TEST(Workspaces, ManyOfThemOneAfterAnother) {
  MemoryManager memory;
  for (int i = 0; i < 100; ++i) {
    Workspaces workspaces(memory);
    EXPECT_NE(workspaces.get({}, 0, 64).data(), nullptr);
    EXPECT_EQ(workspaces.bytes(), 64U);
  }
  EXPECT_EQ(memory.get_allocated_size({}), 0U);
}

}  // namespace
}  // namespace xpuruntime

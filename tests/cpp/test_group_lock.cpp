// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "group_lock.h"

namespace xpuruntime {
namespace {

struct Room {
  std::vector<GroupLock::Group> came, gone;
  GroupLock lock{[this](GroupLock::Group group) { came.push_back(group); },
                 [this](GroupLock::Group group) { gone.push_back(group); }};
};

using Groups = std::vector<GroupLock::Group>;

TEST(GroupLock, AGroupComesWithItsFirstAndIsGoneWithItsLast) {
  Room room;
  room.lock.enter(3);
  room.lock.enter(3);
  EXPECT_EQ(room.came, Groups{3});
  room.lock.leave();
  EXPECT_EQ(room.gone, Groups{});
  room.lock.leave();
  EXPECT_EQ(room.gone, Groups{3});
}

TEST(GroupLock, AnotherGroupIsNotLetInMeanwhile) {
  Room room;
  EXPECT_TRUE(room.lock.try_enter(1));
  EXPECT_TRUE(room.lock.try_enter(1));
  EXPECT_FALSE(room.lock.try_enter(2));
  room.lock.leave();
  EXPECT_FALSE(room.lock.try_enter(2));
  room.lock.leave();
  EXPECT_TRUE(room.lock.try_enter(2));
  EXPECT_EQ(room.came, (Groups{1, 2}));
  room.lock.leave();
}

TEST(GroupLock, NobodyOvertakesOneThatWaits) {
  Room room;
  room.lock.enter(1);
  std::thread other([&] {
    room.lock.enter(2);
    room.lock.leave();
  });
  while (room.lock.try_enter(1)) {  // until the other waits
    room.lock.leave();
    std::this_thread::yield();
  }
  EXPECT_FALSE(room.lock.try_enter(1));
  room.lock.leave();
  other.join();
  EXPECT_TRUE(room.lock.try_enter(1));
  room.lock.leave();
  EXPECT_EQ(room.gone, (Groups{1, 2, 1}));
}

TEST(GroupLock, ManyThreadsOfThreeGroupsAreNeverInTogether) {
  constexpr int kThreads = 9;
  constexpr int kTimes = 300;
  std::int64_t setting = -1;  // plain, so that a race is seen
  std::array<std::atomic<int>, 3> inside{};
  std::atomic<int> wrong{0};
  GroupLock lock([&](GroupLock::Group group) { setting = static_cast<std::int64_t>(group); },
                 [&](GroupLock::Group) { setting = -1; });
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, group = static_cast<std::size_t>(i % 3)] {
      for (int time = 0; time < kTimes; ++time) {
        lock.enter(group);
        ++inside[group];
        if (inside[(group + 1) % 3] + inside[(group + 2) % 3] > 0) ++wrong;
        if (setting != static_cast<std::int64_t>(group)) ++wrong;
        --inside[group];
        lock.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(setting, -1);
}

TEST(GroupLock, ThreadsOfAGroupGoOnBesideEachOther) {
  Room room;
  room.lock.enter(5);
  std::thread other([&] {
    room.lock.enter(5);  // would wait forever otherwise
    room.lock.leave();
  });
  other.join();
  room.lock.leave();
}

TEST(GroupLock, AChildOfAForkForgetsTheOthers) {
  for (const bool inside : {false, true}) {
    Room room;
    room.lock.enter(4);
    room.lock.enter(4);  // as another thread would
    room.lock.before_fork();
    room.lock.after_fork_in_child(inside);
    EXPECT_EQ(room.gone, inside ? Groups{} : Groups{4});
    if (inside) room.lock.leave();
    EXPECT_EQ(room.gone, Groups{4});
    EXPECT_TRUE(room.lock.try_enter(6));
    room.lock.leave();
  }
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "shared_mode_lock.h"

namespace xpuruntime {
namespace {

struct Room {
  std::vector<SharedModeLock::Mode> came, gone;
  SharedModeLock lock{[this](SharedModeLock::Mode mode) { came.push_back(mode); },
                      [this](SharedModeLock::Mode mode) { gone.push_back(mode); }};
};

using Modes = std::vector<SharedModeLock::Mode>;

TEST(SharedModeLock, AModeComesWithItsFirstAndIsGoneWithItsLast) {
  Room room;
  room.lock.enter(3);
  room.lock.enter(3);
  EXPECT_EQ(room.came, Modes{3});
  room.lock.leave();
  EXPECT_EQ(room.gone, Modes{});
  room.lock.leave();
  EXPECT_EQ(room.gone, Modes{3});
}

TEST(SharedModeLock, AnotherModeIsNotLetInMeanwhile) {
  Room room;
  EXPECT_TRUE(room.lock.try_enter(1));
  EXPECT_TRUE(room.lock.try_enter(1));
  EXPECT_FALSE(room.lock.try_enter(2));
  room.lock.leave();
  EXPECT_FALSE(room.lock.try_enter(2));
  room.lock.leave();
  EXPECT_TRUE(room.lock.try_enter(2));
  EXPECT_EQ(room.came, (Modes{1, 2}));
  room.lock.leave();
}

TEST(SharedModeLock, NobodyOvertakesOneThatWaits) {
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
  EXPECT_EQ(room.gone, (Modes{1, 2, 1}));
}

TEST(SharedModeLock, ManyThreadsOfThreeModesAreNeverInTogether) {
  constexpr int kThreads = 9;
  constexpr int kTimes = 300;
  std::int64_t setting = -1;  // plain, so that a race is seen
  std::array<std::atomic<int>, 3> inside{};
  std::atomic<int> wrong{0};
  SharedModeLock lock([&](SharedModeLock::Mode mode) { setting = static_cast<std::int64_t>(mode); },
                      [&](SharedModeLock::Mode) { setting = -1; });
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, mode = static_cast<std::size_t>(i % 3)] {
      for (int time = 0; time < kTimes; ++time) {
        lock.enter(mode);
        ++inside[mode];
        if (inside[(mode + 1) % 3] + inside[(mode + 2) % 3] > 0) ++wrong;
        if (setting != static_cast<std::int64_t>(mode)) ++wrong;
        --inside[mode];
        lock.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(setting, -1);
}

TEST(SharedModeLock, ThreadsOfAModeGoOnBesideEachOther) {
  Room room;
  room.lock.enter(5);
  std::thread other([&] {
    room.lock.enter(5);  // would wait forever otherwise
    room.lock.leave();
  });
  other.join();
  room.lock.leave();
}

TEST(SharedModeLock, AChildOfAForkForgetsTheOthers) {
  for (const bool inside : {false, true}) {
    Room room;
    room.lock.enter(4);
    room.lock.enter(4);  // as another thread would
    room.lock.before_fork();
    room.lock.after_fork_in_child(inside);
    EXPECT_EQ(room.gone, inside ? Modes{} : Modes{4});
    if (inside) room.lock.leave();
    EXPECT_EQ(room.gone, Modes{4});
    EXPECT_TRUE(room.lock.try_enter(6));
    room.lock.leave();
  }
}

}  // namespace
}  // namespace xpuruntime

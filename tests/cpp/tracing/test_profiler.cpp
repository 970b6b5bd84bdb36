// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/profiler.h"

namespace xpuruntime {
namespace {

Profiler& profiler() { return Profiler::instance(); }

const RangeRecord& named(const Recording& recording, const std::string& name) {
  const auto found = std::find_if(recording.ranges.begin(), recording.ranges.end(),
                                  [&](const RangeRecord& one) { return one.name == name; });
  EXPECT_NE(found, recording.ranges.end()) << name;
  return *found;
}

TEST(Profiler, RecordsNothingWhileItIsOff) {
  EXPECT_FALSE(Profiler::active());
  EXPECT_EQ(profiler().begin("early", "test"), 0U);
  profiler().end(0);
  profiler().start(false);
  EXPECT_TRUE(profiler().stop().ranges.empty());
  EXPECT_EQ(profiler().begin("late", "test"), 0U);
}

TEST(Profiler, NestsRangesOfOneThread) {
  profiler().start(false);
  const auto outer = profiler().begin("outer", "a");
  const auto inner = profiler().begin("inner", "b");
  profiler().end(inner);
  profiler().end(outer);
  const auto after = profiler().begin("after", "a");
  profiler().end(after);
  const Recording found = profiler().stop();
  ASSERT_EQ(found.ranges.size(), 3U);
  EXPECT_EQ(named(found, "inner").parent, outer);
  EXPECT_EQ(named(found, "outer").parent, 0U);
  EXPECT_EQ(named(found, "after").parent, 0U);
  EXPECT_EQ(named(found, "inner").category, "b");
  EXPECT_LE(named(found, "outer").start_ns, named(found, "inner").start_ns);
  EXPECT_GE(named(found, "outer").end_ns, named(found, "inner").end_ns);
  EXPECT_GE(named(found, "outer").start_ns, found.start_ns);
  EXPECT_LE(named(found, "after").end_ns, found.end_ns);
  EXPECT_EQ(found.source, WorkSource::kNone);
}

TEST(Profiler, TakesRangesThatEndInAnotherOrder) {
  profiler().start(false);
  const auto first = profiler().begin("first", "t");
  const auto second = profiler().begin("second", "t");
  profiler().end(first);
  const auto third = profiler().begin("third", "t");
  profiler().end(second);
  profiler().end(third);
  const auto fourth = profiler().begin("fourth", "t");
  profiler().end(fourth);
  const Recording found = profiler().stop();
  EXPECT_EQ(named(found, "third").parent, second);
  EXPECT_EQ(named(found, "fourth").parent, 0U);
  for (const RangeRecord& range : found.ranges) EXPECT_TRUE(range.finished) << range.name;
}

TEST(Profiler, EndsOnAnotherThreadWhatThisOneBegan) {
  profiler().start(false);
  const auto id = profiler().begin("handed over", "t");
  std::thread([&] { profiler().end(id); }).join();
  const auto next = profiler().begin("next", "t");
  profiler().end(next);
  const Recording found = profiler().stop();
  EXPECT_TRUE(named(found, "handed over").finished);
  EXPECT_EQ(named(found, "next").parent, 0U);
}

TEST(Profiler, SaysWhatWentOnWhenItEnded) {
  profiler().start(false);
  const auto open = profiler().begin("open", "t");
  const Recording found = profiler().stop();
  EXPECT_FALSE(named(found, "open").finished);
  EXPECT_EQ(named(found, "open").end_ns, found.end_ns);
  profiler().start(false);
  profiler().end(open);  // of the recording before
  const auto other = profiler().begin("other", "t");
  profiler().end(other);
  const Recording next = profiler().stop();
  ASSERT_EQ(next.ranges.size(), 1U);
  EXPECT_EQ(next.ranges[0].parent, 0U);
}

TEST(Profiler, KeepsWhatTheLimitAllowsAndCountsTheRest) {
  profiler().start(false, 5);
  for (int i = 0; i < 8; ++i) profiler().end(profiler().begin("r", "t"));
  const Recording found = profiler().stop();
  EXPECT_EQ(found.ranges.size(), 5U);
  EXPECT_EQ(found.dropped, 3U);
}

TEST(Profiler, RefusesASecondRecordingAndAnEndOfNone) {
  EXPECT_THROW(profiler().stop(), InputError);
  profiler().start(false);
  EXPECT_THROW(profiler().start(false), InputError);
  profiler().stop();
}

TEST(Profiler, WithoutADeviceSaysWhyThereAreRangesOnly) {
  profiler().start(true);
  profiler().end(profiler().begin("r", "t"));
  const Recording found = profiler().stop();
  EXPECT_EQ(found.source, WorkSource::kNone);
  EXPECT_FALSE(found.reason.empty());
  EXPECT_EQ(found.ranges.size(), 1U);
}

TEST(Profiler, TakesThreadsWhileRecordingsBeginAndEnd) {
  std::atomic<bool> go{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (go.load()) {
        const auto outer = profiler().begin("outer", "t");
        const auto inner = profiler().begin("inner", "t");
        profiler().end(inner);
        profiler().end(outer);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    profiler().start(false, 10'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Recording found = profiler().stop();
    for (const RangeRecord& range : found.ranges) {
      EXPECT_LE(range.start_ns, range.end_ns);
      EXPECT_TRUE(range.parent == 0 || range.name == "inner") << range.name;
    }
  }
  go.store(false);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace xpuruntime

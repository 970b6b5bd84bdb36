// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>

#include "fake_kernels.h"
#include "xpuruntime/dispatcher.h"

namespace xpuruntime {
namespace {

using testing::asking;
using testing::Bench;
using testing::candidate;
using testing::contains;
using testing::decide;
using testing::FakeKernel;
using testing::matmul;

// A store in memory that can be told to fail.
class FakeStore final : public TuningStore {
 public:
  std::optional<TunedEntry> find(const std::string& key,
                                 const std::map<std::string, std::string>& validators,
                                 std::string& note) noexcept override {
    ++finds;
    const auto found = entries.find(key);
    if (found == entries.end()) return std::nullopt;
    if (found->second.validators == validators) return found->second;
    note = "stale";
    return std::nullopt;
  }
  void put(const std::string& key, const TunedEntry& entry, std::string& note) noexcept override {
    if (full) {
      note = "the disk is full";
    } else {
      entries[key] = entry;
    }
  }
  std::map<std::string, TunedEntry> entries;
  bool full = false;
  int finds = 0;
};

std::function<void(const OpDesc&, const std::string&, FakeKernel&)> taking(int microseconds) {
  return [microseconds](const OpDesc&, const std::string& config, FakeKernel& made) {
    const auto time = std::chrono::microseconds(microseconds * (config == "slow" ? 3 : 1));
    made.work = [time](void* const*, void*, StreamHandle) {
      const auto end = std::chrono::steady_clock::now() + time;
      while (std::chrono::steady_clock::now() < end) {
      }
    };
  };
}

TEST(DispatcherTuning, TakesTheFastestAndRemembersIt) {
  Bench bench;
  const auto slow = bench.add("slow.k");
  const auto fast = bench.add("fast.k");
  const auto bad = bench.add("bad.k");
  slow->make = taking(300);
  fast->make = taking(60);
  fast->choices = {"slow", "quick", "quick"};
  bad->make = [](const OpDesc&, const std::string&, FakeKernel& made) {
    made.work = [](void* const*, void*, StreamHandle) { throw CudaError("misaligned", "", 716); };
  };
  const auto store = std::make_shared<FakeStore>();
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  Choice choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->chosen, "fast.k");
  EXPECT_EQ(choice.decision->config, "quick");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kTuned);
  EXPECT_FALSE(choice.unmeasured);
  EXPECT_TRUE(candidate(choice, "slow.k").measured_us.value_or(0) > 250);
  EXPECT_TRUE(contains(candidate(choice, "bad.k").reason, "misaligned"));
  ASSERT_EQ(store->entries.size(), 1U);
  const TunedEntry& entry = store->entries.begin()->second;
  ASSERT_EQ(entry.times.size(), 3U);
  EXPECT_EQ(entry.times[0].kernel, "fast.k");
  EXPECT_EQ(entry.times[0].config, "quick");
  EXPECT_EQ(entry.validators.at("fast"), "fast 1");
  EXPECT_TRUE(entry.validators.contains("xpuruntime"));
  EXPECT_TRUE(entry.validators.contains("device"));

  // From this process' memory, then from the store, without measuring.
  const int prepared = slow->prepared;
  EXPECT_EQ(decide(bench, rules).decision->chosen, "fast.k");
  EXPECT_EQ(store->finds, 1);
  bench.dispatcher.forget_measurements();
  choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->chosen, "fast.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kTuned);
  EXPECT_EQ(choice.decision->config, "quick");
  EXPECT_EQ(store->finds, 2);
  EXPECT_EQ(slow->prepared, prepared);
  EXPECT_GT(candidate(choice, "slow.k").measured_us.value_or(0), 250);

  // Another version of one library: measured again, and said.
  bench.backends[0]->number = "2";
  slow->make = taking(10);
  choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->chosen, "slow.k");
  ASSERT_FALSE(choice.decision->notes.empty());
  EXPECT_EQ(choice.decision->notes[0], "stale");
}

TEST(DispatcherTuning, AnEntryThatCannotBePreparedIsPassedOver) {
  Bench bench;
  const auto first = bench.add("first.k");
  bench.add("second.k");
  const auto store = std::make_shared<FakeStore>();
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  (void)decide(bench, rules);
  TunedEntry& entry = store->entries.begin()->second;
  entry.times = {{"gone.k", "", 1}, {"first.k", "algo=9", 2}, {"second.k", "", 3}};
  first->make = [](const OpDesc&, const std::string&, FakeKernel&) {
    throw UnsupportedOperationError("no algorithm 9");
  };
  bench.dispatcher.forget_measurements();
  const Choice choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->chosen, "second.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kTuned);
  ASSERT_EQ(choice.decision->notes.size(), 1U);
  EXPECT_TRUE(contains(choice.decision->notes[0], "first.k@algo=9")) << choice.decision->notes[0];
}

TEST(DispatcherTuning, WhatCannotBeKeptIsSaid) {
  Bench bench;
  bench.add("a.k");
  bench.add("b.k");
  const auto store = std::make_shared<FakeStore>();
  store->full = true;
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  const Choice choice = decide(bench, rules);
  ASSERT_EQ(choice.decision->notes.size(), 1U);
  EXPECT_EQ(choice.decision->notes[0], "the disk is full");
}

TEST(DispatcherTuning, AWatchEndsItAndItIsMeasuredLater) {
  Bench bench;
  bench.add("slow.k")->make = taking(200);
  const auto fast = bench.add("fast.k");
  fast->make = taking(50);
  const auto store = std::make_shared<FakeStore>();
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  bool at_once = true;
  std::size_t asked = 0;
  bench.dispatcher.set_tuning_watch([&](const TunerProgress& progress) {
    ++asked;
    return at_once || progress.rounds == 2;
  });
  for (const int prepared : {0, 1}) {  // before anything is prepared, and after two rounds
    const Choice choice = decide(bench, rules);
    EXPECT_EQ(choice.decision->chosen, "slow.k");
    EXPECT_EQ(choice.decision->source, ChoiceSource::kFirst);
    EXPECT_TRUE(choice.unmeasured);
    ASSERT_EQ(choice.decision->notes.size(), 1U);
    EXPECT_TRUE(contains(choice.decision->notes[0], "cancelled")) << choice.decision->notes[0];
    EXPECT_EQ(fast->prepared, prepared);
    at_once = false;
  }
  EXPECT_EQ(asked, 5U);
  EXPECT_TRUE(store->entries.empty());
  bench.dispatcher.set_tuning_watch(nullptr);
  EXPECT_EQ(decide(bench, rules).decision->chosen, "fast.k");
}

TEST(DispatcherTuning, WhatIsUndecidedIsMeasuredAgainWithMoreTime) {
  Bench bench;
  bench.add("slow.k")->make = taking(200);
  bench.add("fast.k")->make = taking(50);
  const auto store = std::make_shared<FakeStore>();
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  rules.tuning.seconds = 1e-9;
  for (int i = 0; i < 2; ++i) {  // measured, then remembered
    const Choice choice = decide(bench, rules);
    EXPECT_EQ(choice.decision->chosen, "slow.k") << "one round decides nothing";
    EXPECT_TRUE(contains(candidate(choice, "fast.k").reason, "not decided"));
  }
  EXPECT_TRUE(store->entries.begin()->second.undecided);
  EXPECT_EQ(store->entries.begin()->second.rounds, 1U);
  rules.tuning.seconds = 3;
  EXPECT_EQ(decide(bench, rules).decision->chosen, "fast.k");
  EXPECT_FALSE(store->entries.begin()->second.undecided);
  EXPECT_EQ(store->entries.begin()->second.times[0].verdict, "faster");
  rules.tuning.seconds = 1e-9;
  EXPECT_EQ(decide(bench, rules).decision->chosen, "fast.k") << "what is decided holds";
}

TEST(DispatcherTuning, AnotherMarginIsAnotherRecord) {
  Bench bench;
  bench.add("slow.k")->make = taking(200);
  bench.add("fast.k")->make = taking(120);
  const auto store = std::make_shared<FakeStore>();
  bench.dispatcher.set_tuning_store(store);
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  rules.tuning.seconds = 10;  // at most: a busy machine needs more rounds
  EXPECT_EQ(decide(bench, rules).decision->chosen, "fast.k");
  rules.tuning.min_effect = 0.9;
  EXPECT_EQ(decide(bench, rules).decision->chosen, "slow.k");
  EXPECT_EQ(store->entries.size(), 2U);
}

TEST(DispatcherTuning, OneCandidateIsNotMeasured) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  std::atomic<int> launches{0};
  kernel->make = [&](const OpDesc&, const std::string&, FakeKernel& made) {
    made.work = [&](void* const*, void*, StreamHandle) { ++launches; };
  };
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  const Choice choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->source, ChoiceSource::kFirst);
  EXPECT_EQ(launches, 0);
}

TEST(DispatcherTuning, WithoutRoomTheFirstIsTaken) {
  Bench bench;
  bench.add("a.k");
  bench.add("b.k");
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  // 16 TB of operands.
  const Choice choice = decide(bench, rules, {}, matmul(1, std::int64_t{1} << 21, 1 << 21));
  EXPECT_EQ(choice.decision->chosen, "a.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kFirst);
  ASSERT_EQ(choice.decision->notes.size(), 1U);
  EXPECT_TRUE(contains(choice.decision->notes[0], "not measured")) << choice.decision->notes[0];
}

TEST(DispatcherTuning, OnlyWhatMayBeTakenIsMeasured) {
  Bench bench;
  bench.add("a.k")->make = taking(300);
  bench.add("b.k")->make = taking(60);
  const auto shy = bench.add("shy.k");
  shy->by_itself = false;
  KernelRules rules;
  rules.strategy = AutoStrategy::kBestPerformance;
  EXPECT_EQ(decide(bench, rules).decision->chosen, "b.k");
  EXPECT_EQ(shy->prepared, 0);
  rules = asking({"zz"});
  rules.strategy = AutoStrategy::kBestPerformance;
  const Choice choice = decide(bench, rules);
  EXPECT_EQ(choice.decision->chosen, "b.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kFallback);
}

}  // namespace
}  // namespace xpuruntime

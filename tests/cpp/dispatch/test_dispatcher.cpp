// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "fake_kernels.h"
#include "xpuruntime/dispatcher.h"

namespace xpuruntime {
namespace {

using testing::asking;
using testing::Bench;
using testing::contains;
using testing::FakeKernel;
using testing::matmul;
using testing::refusal_of;

Choice decide(Bench& bench, const KernelRules& rules, std::vector<std::string> pin = {},
              const OpDesc& op = matmul(2, 3, 4)) {
  return bench.dispatcher.decide(op, rules, bench.devices.get_device_info({}), {}, {}, pin, true,
                                 true);
}

const Candidate& candidate(const Choice& choice, const std::string& id) {
  const auto& all = choice.decision->candidates;
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Candidate& one) { return one.id == id; });
  EXPECT_NE(found, all.end()) << id;
  return *found;
}

// Every kernel has its verdict, and every no its reason.
void expect_explained(const Bench& bench, const Choice& choice) {
  const std::string text = explain(*choice.decision);
  for (const auto& kernel : bench.registry.kernels(choice.decision->op.kind)) {
    EXPECT_TRUE(contains(text, std::string(kernel->id()))) << text;
  }
  for (const Candidate& one : choice.decision->candidates) {
    EXPECT_EQ(one.reason.empty(), one.accepted && one.id == choice.decision->chosen) << one.id;
  }
}

TEST(Dispatcher, TakesTheFirstThatCanServe) {
  Bench bench;
  bench.add("gpu.k", OpKind::kMatmul, DeviceType::kCuda);
  bench.add("gone.k");
  bench.backends.back()->missing = "libgone.so is not there: pip install gone";
  bench.add("small.k")->refuses = [](const OpDesc&) { return Support::no("m is not 1"); };
  bench.add("broken.k")->make = [](const OpDesc&, const std::string&, FakeKernel&) {
    throw UnsupportedOperationError("the library refuses");
  };
  bench.add("shy.k")->by_itself = false;
  bench.add("good.k");
  bench.add("later.k");
  const Choice choice = decide(bench, {});
  EXPECT_EQ(choice.decision->chosen, "good.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kFirst);
  EXPECT_EQ(choice.decision->asked_by, "default");
  EXPECT_EQ(candidate(choice, "gpu.k").reason, "serves cuda, and the operands are on cpu");
  EXPECT_EQ(candidate(choice, "gone.k").reason, "libgone.so is not there: pip install gone");
  EXPECT_EQ(candidate(choice, "small.k").reason, "m is not 1");
  EXPECT_EQ(candidate(choice, "broken.k").reason, "the library refuses");
  EXPECT_EQ(candidate(choice, "shy.k").reason, "is taken only where it is asked for");
  EXPECT_EQ(candidate(choice, "later.k").reason, "was not needed: good.k serves");
  EXPECT_TRUE(choice.decision->notes.empty());
  EXPECT_NE(choice.kernel, nullptr);
  EXPECT_EQ(bench.backends.back()->asked, 0) << "a library is not loaded for nothing";
  EXPECT_EQ(bench.backends.front()->asked, 0);
  expect_explained(bench, choice);
}

TEST(Dispatcher, PlanningPreparesNothing) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  KernelRules rules;
  for (const AutoStrategy strategy :
       {AutoStrategy::kFirstSupported, AutoStrategy::kBestPerformance}) {
    rules.strategy = strategy;
    const Choice choice =
        bench.dispatcher.decide(matmul(1, 1, 1), rules, DeviceInfo{}, "", "", {}, false, false);
    EXPECT_EQ(choice.decision->chosen, "a.k");
    EXPECT_EQ(choice.kernel, nullptr);
  }
  EXPECT_EQ(kernel->prepared, 0);
}

TEST(Dispatcher, FollowsTheListInOrder) {
  Bench bench;
  bench.add("a.k")->words = {"fast"};
  bench.add("b.k");
  bench.add("shy.k")->by_itself = false;
  EXPECT_EQ(decide(bench, asking({"b"})).decision->chosen, "b.k");
  EXPECT_EQ(decide(bench, asking({"fast", "b"})).decision->chosen, "a.k");
  EXPECT_EQ(decide(bench, asking({"shy.k"})).decision->chosen, "shy.k");
  const Choice choice = decide(bench, asking({"nobody", "b.k"}));
  EXPECT_EQ(choice.decision->chosen, "b.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kPinned);
  EXPECT_EQ(choice.decision->asked_by, "kernels.matmul");
  EXPECT_TRUE(contains(candidate(choice, "nobody").reason,
                       "no such kernel is registered for matmul; registered are a.k, b.k, shy.k"));
  expect_explained(bench, choice);
  KernelRules rules;
  rules.rules.push_back({testing::match_of("matmul"), {"b.k"}, "kernels.rules[0]"});
  EXPECT_EQ(decide(bench, rules).decision->source, ChoiceSource::kRule);
  EXPECT_EQ(decide(bench, asking({"nobody", "auto"})).decision->source, ChoiceSource::kFirst);
}

TEST(Dispatcher, ReplacesWhatIsOnlyPreferredAndSaysSo) {
  Bench bench;
  bench.add("a.k")->refuses = [](const OpDesc&) { return Support::no("odd sizes"); };
  bench.add("b.k");
  const Choice choice = decide(bench, asking({"a.k", "a.kk"}));
  EXPECT_EQ(choice.decision->chosen, "b.k");
  EXPECT_EQ(choice.decision->source, ChoiceSource::kFallback);
  ASSERT_EQ(choice.decision->notes.size(), 1U);
  const std::string& note = choice.decision->notes[0];
  EXPECT_TRUE(contains(note, "kernels.matmul asks for a.k")) << note;
  EXPECT_TRUE(contains(note, "odd sizes")) << note;
  EXPECT_TRUE(contains(note, "did you mean 'a.k'?")) << note;
  EXPECT_TRUE(contains(note, "b.k serves instead")) << note;
  expect_explained(bench, choice);
}

TEST(Dispatcher, StrictRefusesAndNamesEverybody) {
  Bench bench;
  bench.add("a.k")->refuses = [](const OpDesc&) { return Support::no("odd sizes"); };
  bench.add("b.k");
  bench.add("gpu.k", OpKind::kMatmul, DeviceType::kCuda);
  const std::string text =
      refusal_of([&] { decide(bench, asking({"a.k"}, Enforcement::kStrict)); });
  for (const char* part : {"kernels.matmul", "a.k: odd sizes", "b.k: can serve",
                           "gpu.k: serves cuda", "matmul fp32 [2, 4] x [4, 3], cpu"}) {
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  }
  EXPECT_EQ(decide(bench, asking({"a.k", "auto"}, Enforcement::kStrict)).decision->chosen, "b.k");
}

TEST(Dispatcher, WhatTheCallItselfAsksForIsHeldStrictly) {
  Bench bench;
  bench.add("a.k")->refuses = [](const OpDesc&) { return Support::no("odd sizes"); };
  bench.add("b.k");
  const std::string text = refusal_of([&] { decide(bench, asking({"b.k"}), {"a.k"}); });
  EXPECT_TRUE(contains(text, "as kernel= demands")) << text;
  EXPECT_TRUE(contains(text, "a.k: odd sizes")) << text;
  const Choice choice = decide(bench, asking({"b.k"}), {"a.k", "auto"});
  EXPECT_EQ(choice.decision->chosen, "b.k");
  EXPECT_EQ(choice.decision->asked_by, "kernel=");
}

TEST(Dispatcher, NothingCanServe) {
  Bench bench;
  EXPECT_TRUE(contains(refusal_of([&] { decide(bench, {}); }), "none is registered"));
  bench.add("a.k")->refuses = [](const OpDesc&) { return Support::no(""); };
  const std::string text = refusal_of([&] { decide(bench, asking({"zz"})); });
  EXPECT_TRUE(contains(text, "no kernel can serve")) << text;
  EXPECT_TRUE(contains(text, "kernels.matmul asks for zz")) << text;
  EXPECT_TRUE(contains(text, "gives no reason")) << text;
}

TEST(Dispatcher, ReplaysAConfig) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  kernel->make = [](const OpDesc&, const std::string& config, FakeKernel& made) {
    if (config == "nonsense") throw InputError("config 'nonsense' cannot be read");
    if (config == "old") throw UnsupportedOperationError("algorithm old is of another version");
    made.settled = config.empty() ? "algo=7" : config;
  };
  EXPECT_EQ(decide(bench, asking({"a.k"})).decision->config, "algo=7");
  EXPECT_EQ(decide(bench, asking({"a.k@algo=3,split=2"})).decision->config, "algo=3,split=2");
  EXPECT_THROW(decide(bench, asking({"a.k@nonsense"})), InputError);
  const Choice choice = decide(bench, asking({"a.k@old", "a.k"}));
  EXPECT_EQ(choice.decision->config, "algo=7");
  EXPECT_EQ(choice.decision->candidates.size(), 2U) << "one for each config";
  EXPECT_FALSE(choice.decision->candidates[0].accepted);
}

TEST(Dispatcher, DeterministicWorkTakesRepeatableKernels) {
  Bench bench;
  bench.add("atomic.k")->make = [](const OpDesc&, const std::string&, FakeKernel& made) {
    made.repeats = false;
  };
  bench.add("exact.k");
  OpDesc op = matmul(2, 3, 4);
  EXPECT_EQ(decide(bench, {}, {}, op).decision->chosen, "atomic.k");
  op.attributes.deterministic = true;
  const Choice choice = decide(bench, {}, {}, op);
  EXPECT_EQ(choice.decision->chosen, "exact.k");
  EXPECT_TRUE(contains(candidate(choice, "atomic.k").reason, "other bits"));
  EXPECT_THROW(decide(bench, {}, {"atomic.k"}, op), UnsupportedOperationError);
}

TEST(Dispatcher, ErrorsThatAreNobodysVerdictPass) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  bench.add("b.k");
  kernel->make = [](const OpDesc&, const std::string&, FakeKernel&) {
    throw OutOfMemoryError("no memory", "cpu", 5);
  };
  EXPECT_THROW(decide(bench, {}), OutOfMemoryError);
  kernel->make = [](const OpDesc&, const std::string&, FakeKernel&) {
    throw CudaError("lost", "cuda:0", 4);
  };
  EXPECT_THROW(decide(bench, {}), CudaError);
  kernel->make = nullptr;
  EXPECT_EQ(decide(bench, {}).decision->chosen, "a.k") << "and everything works again";
}

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

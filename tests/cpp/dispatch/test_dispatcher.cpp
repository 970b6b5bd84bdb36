// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

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
using testing::refusal_of;

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

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstdio>

#include "fake_kernels.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime {
namespace {

using testing::asking;
using testing::Bench;
using testing::FakeKernel;
using testing::matmul;
using testing::shared;

std::array<void*, kMaxSlots> operands{};

void on_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

TEST(CallSite, DecidesOnceAndCounts) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  std::atomic<int> launches{0};
  kernel->make = [&](const OpDesc&, const std::string&, FakeKernel& made) {
    made.work = [&](void* const*, void*, StreamHandle) { ++launches; };
  };
  CallSite site(bench.dispatcher, shared({}), "node", "module");
  EXPECT_FALSE(site.try_run(matmul(1, 2, 3), operands.data(), 0));
  for (int i = 0; i < 5; ++i) site.run(matmul(1, 2, 3), operands.data(), 0);
  EXPECT_TRUE(site.try_run(matmul(1, 2, 3), operands.data(), 0));
  site.run(matmul(2, 2, 3), operands.data(), 0);
  EXPECT_EQ(launches, 7);
  EXPECT_EQ(kernel->prepared, 2);
  const auto decisions = bench.dispatcher.log().decisions();
  ASSERT_EQ(decisions.size(), 2U);
  EXPECT_EQ(decisions[0]->count, 6U);
  EXPECT_EQ(decisions[1]->count, 1U);
  EXPECT_EQ(decisions[0]->node, "node");
  EXPECT_EQ(decisions[0]->module, "module");
  EXPECT_THROW(CallSite(bench.dispatcher, nullptr), InputError);
}

TEST(CallSite, ClearedDecisionsComeBackWhenTheyServe) {
  Bench bench;
  bench.add("a.k");
  CallSite site(bench.dispatcher, shared({}));
  site.run(matmul(1, 2, 3), operands.data(), 0);
  site.run(matmul(2, 2, 3), operands.data(), 0);
  bench.dispatcher.log().clear();
  EXPECT_TRUE(bench.dispatcher.log().decisions().empty());
  for (int i = 0; i < 3; ++i) site.run(matmul(2, 2, 3), operands.data(), 0);
  const auto decisions = bench.dispatcher.log().decisions();
  ASSERT_EQ(decisions.size(), 1U);
  EXPECT_EQ(decisions[0]->count, 3U);
}

TEST(CallSite, TheLogHasAnEnd) {
  Bench bench;
  bench.add("a.k");
  CallSite site(bench.dispatcher, shared({}));
  for (std::size_t i = 0; i < DecisionLog::kMost + 5; ++i) {
    site.run(matmul(static_cast<std::int64_t>(i), 1, 1), operands.data(), 0);
  }
  EXPECT_EQ(bench.dispatcher.log().decisions().size(), DecisionLog::kMost);
  EXPECT_EQ(bench.dispatcher.log().dropped(), 5U);
  bench.dispatcher.log().clear();
  EXPECT_EQ(bench.dispatcher.log().dropped(), 0U);
}

TEST(CallSite, RecordsApartWhereItsRulesSaySo) {
  Bench bench;
  bench.add("a.k");
  const auto apart = std::make_shared<DecisionLog>();
  KernelRules rules;
  rules.log = apart;
  CallSite site(bench.dispatcher, shared(rules), "node");
  CallSite other(bench.dispatcher, shared({}), "other");
  for (std::size_t i = 0; i < DecisionLog::kMost; ++i) {  // the log of the process is full
    other.run(matmul(static_cast<std::int64_t>(i), 1, 1), operands.data(), 0);
  }
  for (int i = 0; i < 3; ++i) site.run(matmul(1, 2, 3), operands.data(), 0);
  site.run(matmul(2, 2, 3), operands.data(), 0);
  ASSERT_EQ(apart->decisions().size(), 2U);
  EXPECT_EQ(apart->decisions()[0]->node, "node");
  EXPECT_EQ(apart->counts(), (std::vector<std::uint64_t>{3, 1}));
  EXPECT_EQ(bench.dispatcher.log().dropped(), 0U);
  bench.dispatcher.log().clear();
  site.run(matmul(2, 2, 3), operands.data(), 0);
  EXPECT_EQ(apart->counts(), (std::vector<std::uint64_t>{3, 2}));
  EXPECT_TRUE(bench.dispatcher.log().decisions().empty());
  apart->clear();
  site.run(matmul(2, 2, 3), operands.data(), 0);
  EXPECT_EQ(apart->counts(), (std::vector<std::uint64_t>{1}));
}

TEST(CallSite, ForgetsWhenKernelsComeAndGo) {
  Bench bench;
  bench.add("b.k");
  CallSite site(bench.dispatcher, shared(asking({"a.k", "auto"})));
  EXPECT_EQ(site.choose(matmul(1, 1, 1), 0)->decision->chosen, "b.k");
  bench.add("a.k");
  EXPECT_EQ(site.choose(matmul(1, 1, 1), 0)->decision->chosen, "a.k");
  const std::shared_ptr<const Choice> held = site.choose(matmul(1, 1, 1), 0);
  bench.registry.remove("a");
  EXPECT_EQ(site.choose(matmul(1, 1, 1), 0)->decision->chosen, "b.k");
  held->kernel->launch(operands.data(), nullptr, 0);  // still valid
}

TEST(CallSite, KeepsAtMostSoMany) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  std::atomic<int> alive{0};
  kernel->make = [&](const OpDesc&, const std::string&, FakeKernel& made) {
    ++alive;
    made.work = [guard = std::shared_ptr<void>(nullptr, [&](void*) { --alive; })](
                    void* const*, void*, StreamHandle) {};
  };
  {
    CallSite site(bench.dispatcher, shared({}));
    const auto most = static_cast<std::int64_t>(CallSite::kMost);
    for (std::int64_t i = 0; i < 3 * most; ++i) (void)site.choose(matmul(i, 1, 1), 0);
    EXPECT_LE(alive, most + 1);
    EXPECT_GE(alive, 1);
    (void)site.choose(matmul(3 * most - 1, 1, 1), 0);
    EXPECT_EQ(kernel->prepared, 3 * most) << "the newest is kept";
  }
  EXPECT_EQ(alive, 0);
}

TEST(CallSite, ErrorsAreNotKept) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  bool fail = true;
  kernel->make = [&](const OpDesc&, const std::string&, FakeKernel&) {
    if (fail) throw OutOfMemoryError("full", "cpu", 1);
  };
  CallSite site(bench.dispatcher, shared({}));
  EXPECT_THROW((void)site.choose(matmul(1, 1, 1), 0), OutOfMemoryError);
  EXPECT_TRUE(bench.dispatcher.log().decisions().empty());
  fail = false;
  EXPECT_EQ(site.choose(matmul(1, 1, 1), 0)->decision->chosen, "a.k");
  EXPECT_THROW((void)site.choose(matmul(1, 1, 1, parse_dtype("float32"), {DeviceType::kCpu, 3}), 0),
               InputError);
}

TEST(CallSite, ALaunchThatFailsIsNotCounted) {
  Bench bench;
  bench.add("a.k")->make = [](const OpDesc&, const std::string&, FakeKernel& made) {
    made.work = [](void* const*, void*, StreamHandle) { throw CudaError("launch", "cuda:0", 1); };
  };
  CallSite site(bench.dispatcher, shared({}));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(site.run(matmul(1, 1, 1), operands.data(), 0), CudaError);
  }
  EXPECT_EQ(bench.dispatcher.log().decisions().at(0)->count, 0U);
}

TEST(CallSite, AsksForTheWorkspaceOfTheKernel) {
  Bench bench;
  bench.add("a.k")->make = [](const OpDesc& op, const std::string&, FakeKernel& made) {
    made.workspace = static_cast<std::size_t>(op[0].shape[0]);
    made.work = [](void* const*, void* scratch, StreamHandle) {
      if (scratch == nullptr) throw InputError("no scratch");
    };
  };
  CallSite site(bench.dispatcher, shared({}));
  site.run(matmul(1000, 1, 1), operands.data(), 0);
  site.run(matmul(10, 1, 1), operands.data(), 0);
  EXPECT_EQ(bench.dispatcher.workspaces().bytes(), 1000U);
  EXPECT_THROW(site.run(matmul(0, 1, 1), operands.data(), 0), InputError);
}

TEST(CallSite, ManyThreadsPrepareOnce) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  kernel->make = [](const OpDesc&, const std::string&, FakeKernel&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  CallSite site(bench.dispatcher, shared({}));
  constexpr int kThreads = 16, kKeys = 20, kTurns = 50;
  std::barrier start(kThreads);
  on_threads(kThreads, [&](int thread) {
    start.arrive_and_wait();
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int key = 0; key < kKeys; ++key) {
        const OpDesc op = matmul((key + thread) % kKeys, 1, 1);
        EXPECT_EQ(site.choose(op, 0)->decision->op, op);
        site.run(op, operands.data(), 0);
      }
    }
  });
  EXPECT_EQ(kernel->prepared, kKeys);
  std::uint64_t calls = 0;
  for (const auto& decision : bench.dispatcher.log().decisions()) calls += decision->count;
  EXPECT_EQ(calls, std::uint64_t{kThreads} * kTurns * kKeys);
}

// Who waits for one key does not hold up another.
TEST(CallSite, OthersDoNotWait) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  std::atomic<bool> other_is_done{false};
  kernel->make = [&](const OpDesc& op, const std::string&, FakeKernel&) {
    if (op[0].shape[0] != 1) return;
    while (!other_is_done) std::this_thread::yield();
  };
  CallSite site(bench.dispatcher, shared({}));
  std::thread slow([&] { (void)site.choose(matmul(1, 1, 1), 0); });
  (void)site.choose(matmul(2, 1, 1), 0);
  other_is_done = true;
  slow.join();
}

TEST(CallSite, AnErrorIsToldToAllWhoWait) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  std::atomic<int> begun{0};
  kernel->make = [&](const OpDesc&, const std::string&, FakeKernel&) {
    ++begun;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    throw CudaError("broken", "cuda:0", 700);
  };
  CallSite site(bench.dispatcher, shared({}));
  std::atomic<int> told{0};
  on_threads(8, [&](int) {
    try {
      (void)site.choose(matmul(1, 1, 1), 0);
    } catch (const CudaError& error) {
      if (error.status() == 700 && std::string(error.what()) == "broken") ++told;
    }
  });
  EXPECT_EQ(told, 8);
  EXPECT_LE(begun, 8);
}

TEST(CallSite, AKernelThatAsksForItselfIsRefused) {
  Bench bench;
  const auto kernel = bench.add("a.k");
  CallSite* site = nullptr;
  kernel->make = [&](const OpDesc& op, const std::string&, FakeKernel&) {
    (void)site->choose(op[0].shape[0] == 5 ? matmul(4, 1, 1) : op, 0);
  };
  CallSite made(bench.dispatcher, shared({}));
  site = &made;
  EXPECT_THROW((void)made.choose(matmul(4, 1, 1), 0), UnsupportedOperationError);
}

TEST(CallSite, RegistrationWhileOthersCall) {
  Bench bench;
  bench.add("a.k");
  CallSite site(bench.dispatcher, shared({}));
  std::atomic<bool> done{false};
  std::thread changes([&] {
    for (int i = 0; i < 200; ++i) {
      bench.registry.add(std::make_shared<testing::FakeDefinition>(
          std::make_shared<testing::FakeBackend>("x"), "x.k"));
      bench.registry.remove("x");
    }
    done = true;
  });
  on_threads(4, [&](int thread) {
    while (!done) site.run(matmul(thread % 2, 1, 1), operands.data(), 0);
  });
  changes.join();
  EXPECT_EQ(site.choose(matmul(1, 1, 1), 0)->decision->chosen, "a.k");
}

// Prints what a cached look-up and a cached call cost; the promise is 200 ns.
TEST(CallSite, CachedChoicesAreCheap) {
  Bench bench;
  bench.add("a.k");
  CallSite site(bench.dispatcher, shared({}));
  std::vector<OpDesc> ops;
  for (std::int64_t i = 0; i < 64; ++i) ops.push_back(matmul(16 + i, 4096, 4096));
  for (const OpDesc& op : ops) (void)site.choose(op, 0);
  const auto measure = [&](const auto& body) {
    constexpr int kTurns = 2000;
    double best = 1e9;
    for (int round = 0; round < 7; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int turn = 0; turn < kTurns; ++turn) {
        for (const OpDesc& op : ops) body(op);
      }
      const std::chrono::duration<double, std::nano> time =
          std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count() / (kTurns * 64.0));
    }
    return best;
  };
  const double choose = measure([&](const OpDesc& op) { (void)site.choose(op, 0); });
  const double run = measure([&](const OpDesc& op) { site.run(op, operands.data(), 0); });
  std::printf("cached choose: %.1f ns, cached run of an empty kernel: %.1f ns\n", choose, run);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(choose, 1000);
  EXPECT_LE(run, 1000);
#endif
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include "fake_kernels.h"
#include "tuning/tuner_operands.h"
#include "xpuruntime/tuner.h"

namespace xpuruntime {
namespace {

using testing::FakeKernel;
using testing::matmul;

constexpr int kLaunchesBeforeRounds = 2;

struct TunerTest : ::testing::Test {
  std::shared_ptr<const Kernel> taking(int microseconds) {
    auto kernel = std::make_shared<FakeKernel>();
    const auto time = std::chrono::microseconds(microseconds);
    kernel->work = [time](void* const*, void*, StreamHandle) {
      const auto end = std::chrono::steady_clock::now() + time;
      while (std::chrono::steady_clock::now() < end) {
      }
    };
    return kernel;
  }
  TunerResult measure(std::vector<std::shared_ptr<const Kernel>> kernels,
                      const OpDesc& op = matmul(64, 64, 64),
                      const TunerOptions& options = with_time_to_decide()) {
    return Tuner(devices, memory).measure(op, kernels, options);
  }

  static TunerOptions with_time_to_decide() {
    TunerOptions options;
    options.rule.seconds = 60;
    return options;
  }

  DeviceManager devices;
  MemoryManager memory;
};

TEST_F(TunerTest, FindsTheFastest) {
  const TunerResult result = measure({taking(200), taking(60), taking(3000)});
  ASSERT_TRUE(result.best.has_value());
  EXPECT_EQ(*result.best, 1U);
  EXPECT_GE(*result.times[1].microseconds, 60);
  EXPECT_GE(*result.times[0].microseconds, 200);
  EXPECT_TRUE(testing::contains(result.times[2].reason, "twice"));
  EXPECT_GE(result.rounds, 2);
  EXPECT_GT(result.sets, 1U);
}

TEST_F(TunerTest, TiesGoToTheFirst) {
  const auto kernel = taking(200);
  const TunerResult result = measure({kernel, kernel, kernel});
  EXPECT_EQ(result.best, 0U);
  EXPECT_FALSE(result.times[0].comparison.has_value()) << "it is the control";
  for (const std::size_t i : {1U, 2U}) {
    const auto& time = result.times[i];
    ASSERT_TRUE(time.comparison.has_value() || testing::contains(time.reason, "twice"))
        << "other work of the machine can make one look slow";
    if (time.comparison) {
      EXPECT_NE(time.comparison->verdict, Verdict::kFaster);
    }
  }
}

TEST_F(TunerTest, NothingReplacesTheFirstByLessThanTheMargin) {
  TunerOptions options = with_time_to_decide();
  options.rule.min_effect = 0.9;
  const TunerResult result = measure({taking(200), taking(120)}, matmul(64, 64, 64), options);
  EXPECT_EQ(result.best, 0U) << "the first takes 1.67 times as long, and not 1.9";
  ASSERT_TRUE(result.times[1].comparison.has_value());
  EXPECT_TRUE(result.times[1].comparison->not_faster || result.undecided);
}

TEST_F(TunerTest, WithoutTimeToDecideTheFirstStays) {
  TunerOptions options;
  options.rule.seconds = 1e-9;
  const TunerResult result = measure({taking(100), taking(60)}, matmul(64, 64, 64), options);
  EXPECT_EQ(result.best, 0U);
  EXPECT_TRUE(result.undecided);
  EXPECT_EQ(result.rounds, 1U);
}

TEST_F(TunerTest, TheWatchSeesTheRoundsAndEndsThem) {
  TunerOptions options;
  std::vector<std::size_t> rounds;
  options.watch = [&](const TunerProgress& progress) {
    EXPECT_EQ(progress.op, "matmul");
    EXPECT_EQ(progress.candidates, 2U);
    EXPECT_GE(progress.most_rounds, 7U);
    rounds.push_back(progress.rounds);
    return progress.rounds == 1;  // before the round after which slow ones are dropped
  };
  const auto kernel = taking(50);
  TunerResult result = measure({kernel, kernel}, matmul(64, 64, 64), options);
  EXPECT_TRUE(result.cancelled);
  EXPECT_EQ(rounds, (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(result.best, 0U);
  options.watch = [](const TunerProgress&) { return true; };
  result = measure({kernel, kernel}, matmul(64, 64, 64), options);
  EXPECT_TRUE(result.cancelled);
  EXPECT_EQ(result.rounds, 0U);
  EXPECT_EQ(result.best, 0U);
}

TEST_F(TunerTest, AnotherTakesThePlaceOfAControlThatFails) {
  auto later = std::make_shared<FakeKernel>();
  const auto slow = taking(100);
  later->work = [slow, calls = std::make_shared<int>(0)](void* const* operands, void* scratch,
                                                         StreamHandle stream) {
    if (++*calls > kLaunchesBeforeRounds) throw std::runtime_error("enough");
    slow->launch(operands, scratch, stream);
  };
  const TunerResult result = measure({later, taking(100), taking(50)});
  EXPECT_EQ(result.best, 2U);
  EXPECT_TRUE(testing::contains(result.times[0].reason, "enough"));
  ASSERT_TRUE(result.times[2].comparison.has_value());
  EXPECT_LT(result.times[2].comparison->ratio, 0.8);
}

TEST_F(TunerTest, RejectsWhatFails) {
  auto at_once = std::make_shared<FakeKernel>();
  at_once->work = [](void* const*, void*, StreamHandle) { throw CudaError("illegal", "", 700); };
  auto later = std::make_shared<FakeKernel>();
  later->work = [calls = std::make_shared<int>(0)](void* const*, void*, StreamHandle) {
    if (++*calls > kLaunchesBeforeRounds) throw std::runtime_error("in the first round");
  };
  TunerResult result = measure({at_once, later, taking(50)});
  EXPECT_EQ(result.best, 2U);
  EXPECT_FALSE(result.times[0].microseconds.has_value());
  EXPECT_TRUE(testing::contains(result.times[0].reason, "illegal"));
  EXPECT_TRUE(testing::contains(result.times[1].reason, "in the first round"));
  result = measure({at_once});
  EXPECT_FALSE(result.best.has_value());
  EXPECT_FALSE(measure({}).best.has_value());
}

TEST_F(TunerTest, RotatesOperandsOfTheDescribedForm) {
  OpDesc op = matmul(100, 70, 30);
  op.tensors[slots::Matmul::kA].alignment = 2;
  op.tensors[slots::Matmul::kB].strides = {-70, 1};  // rows from the last to the first
  auto kernel = std::make_shared<FakeKernel>();
  kernel->workspace = 5000;
  std::set<void*> seen;
  kernel->work = [&](void* const* operands, void* scratch, StreamHandle) {
    const auto address = [&](std::size_t slot) {
      return reinterpret_cast<std::uintptr_t>(operands[slot]);
    };
    if (address(slots::Matmul::kA) % 8 != 4) throw InputError("a is not aligned as described");
    if (address(slots::Matmul::kB) % 256 != 0) throw InputError("b is not aligned as described");
    if (operands[slots::Matmul::kBias] != nullptr) throw InputError("there is no bias");
    const auto* a = static_cast<const float*>(operands[slots::Matmul::kA]);
    const auto* b = static_cast<const float*>(operands[slots::Matmul::kB]);
    for (int i : {0, 1, 2999}) {
      if (!(std::fabs(a[i]) >= 0.25F && std::fabs(a[i]) < 2.0F))
        throw InputError("a is not random");
    }
    if (!(std::fabs(b[-70 * 29]) < 2.0F && b[-70 * 29] != 0)) throw InputError("b is not random");
    std::memset(operands[slots::Matmul::kOut], 0, 100 * 70 * sizeof(float));
    std::memset(scratch, 0, 5000);
    seen.insert(operands[slots::Matmul::kA]);
  };
  const TunerResult result = measure({kernel, taking(1)}, op);
  EXPECT_EQ(result.times[0].reason.find("failed"), std::string::npos) << result.times[0].reason;
  EXPECT_GT(seen.size(), 4U);
  EXPECT_GT(result.sets, 8U);
}

TEST_F(TunerTest, KeepsWithinItsMemoryAndGivesItBack) {
  const OpDesc op = matmul(1024, 1024, 1024);  // 12 MiB a set
  TunerOptions options;
  options.memory = 30U << 20U;
  TunerResult result = measure({taking(10), taking(10)}, op, options);
  EXPECT_EQ(result.sets, 2U);
  EXPECT_LE(result.operand_bytes, options.memory);
  options.memory = 1;
  result = measure({taking(10), taking(10)}, op, options);
  EXPECT_EQ(result.sets, 1U) << "one set may be larger";
  EXPECT_EQ(memory.get_stats({}).reserved, 0U);
  EXPECT_THROW((void)measure({taking(1)}, matmul(1 << 22, 1 << 22, 1)), OutOfMemoryError);
  EXPECT_EQ(memory.get_stats({}).reserved, 0U);
}

TEST_F(TunerTest, NothingIsTooSmall) {
  for (const OpDesc& op : {matmul(0, 5, 5), matmul(5, 5, 0), matmul(1, 1, 1)}) {
    EXPECT_TRUE(measure({taking(5), taking(5)}, op).best.has_value()) << describe(op);
  }
}

// Every dtype that operations take gets finite numbers.
TEST(TunerOperands, PlansEveryDtype) {
  MemoryManager memory;
  const auto pool = memory.default_pool({});
  const Stream stream = Stream::wrap({}, 0);
  for (const char* name : {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
                           "float8_e5m2", "int64", "int8", "bool"}) {
    const OpDesc op = matmul(33, 17, 9, parse_dtype(name));
    const OperandPlan plan(op);
    const TunerOperands operands(op, plan, 3, 0, *pool, stream);
    const std::size_t bytes = plan.bytes[slots::Matmul::kA];
    ASSERT_EQ(bytes, 33 * 9 * parse_dtype(name).itemsize()) << name;
    std::vector<unsigned char> first(bytes);
    std::memcpy(first.data(), operands.set(0)[slots::Matmul::kA], bytes);
    EXPECT_EQ(std::memcmp(first.data(), operands.set(2)[slots::Matmul::kA], bytes), 0) << name;
    EXPECT_TRUE(std::any_of(first.begin(), first.end(), [](auto byte) { return byte != 0; }));
    if (std::string(name) == "float8_e4m3fn") {
      EXPECT_TRUE(std::none_of(first.begin(), first.end(),
                               [](auto byte) { return (byte & 0x7F) == 0x7F; }));
    }
  }
}

}  // namespace
}  // namespace xpuruntime

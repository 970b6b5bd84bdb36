// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include "fake_kernels.h"
#include "xpuruntime/kernel_rules.h"

namespace xpuruntime {
namespace {

using testing::matmul;

DeviceInfo sm90() {
  DeviceInfo info;
  info.id = {DeviceType::kCuda, 1};
  info.compute_capability = {9, 0};
  return info;
}

OpDesc on_cuda() { return matmul(8, 64, 32, parse_dtype("bfloat16"), {DeviceType::kCuda, 1}); }

TEST(KernelRules, EveryKeyMustHold) {
  const OpDesc op = on_cuda();
  const auto holds = [&](const KernelMatch& match) { return match.matches(op, sm90()); };
  KernelMatch match;
  EXPECT_TRUE(holds(match));
  match.op = "matmul";
  match.m = IntRange{0, 16};
  match.n = IntRange{64, 64};
  match.k = IntRange{32};
  match.dtypes = {"fp16", "bf16"};
  match.device = "cuda";
  match.phases = {"infer"};
  EXPECT_TRUE(holds(match));
  const auto fails = [&](auto change) {
    KernelMatch other = match;
    change(other);
    return !holds(other);
  };
  EXPECT_TRUE(fails([](auto& one) { one.op = "conv"; }));
  EXPECT_TRUE(fails([](auto& one) { one.m = IntRange{9, 16}; }));
  EXPECT_TRUE(fails([](auto& one) { one.n = IntRange{0, 63}; }));
  EXPECT_TRUE(fails([](auto& one) { one.k = IntRange{33}; }));
  EXPECT_TRUE(fails([](auto& one) { one.head_dim = IntRange{}; })) << "a matmul has none";
  EXPECT_TRUE(fails([](auto& one) { one.dtypes = {"fp16"}; }));
  EXPECT_TRUE(fails([](auto& one) { one.device = "cpu"; }));
  EXPECT_TRUE(fails([](auto& one) { one.device = "cuda:0"; }));
  EXPECT_TRUE(fails([](auto& one) { one.phases = {"train", "backward"}; }));
  for (const char* device : {"cuda", "cuda:1", "sm90", "auto", ""}) {
    EXPECT_FALSE(fails([&](auto& one) { one.device = device; })) << device;
  }
  for (const char* device : {"sm80", "sm9", "sm900", "cud", "cuda:10", "cuda:"}) {
    EXPECT_TRUE(fails([&](auto& one) { one.device = device; })) << device;
  }
  KernelMatch arch;
  arch.device = "sm00";
  EXPECT_FALSE(arch.matches(matmul(1, 1, 1), DeviceInfo{})) << "the CPU has none";
}

KernelMatch rows_up_to(std::int64_t last) {
  return testing::match_with([&](KernelMatch& match) { match.m = IntRange{0, last}; });
}

TEST(KernelRules, FirstRuleThenShortFormThenAuto) {
  KernelRules rules;
  rules.rules.push_back({testing::match_of("conv"), {"cudnn"}, "kernels.rules[0]"});
  rules.rules.push_back({rows_up_to(4), {"a.b"}, "kernels.rules[1]"});
  rules.rules.push_back({rows_up_to(8), {"c.d", "auto"}, "kernels.rules[2]"});
  rules.defaults.push_back({testing::match_of("matmul"), {"cublasLt"}, "kernels.matmul"});
  const auto choose = [&](const OpDesc& op) { return rules.choose(op, DeviceInfo{}); };
  Preference found = choose(matmul(8, 1, 1));
  EXPECT_EQ(found.source, "kernels.rules[2]");
  EXPECT_EQ(found.use, (std::vector<std::string>{"c.d", "auto"}));
  EXPECT_TRUE(found.from_rule);
  found = choose(matmul(9, 1, 1));
  EXPECT_EQ(found.source, "kernels.matmul");
  EXPECT_FALSE(found.from_rule);
  OpDesc norm;
  norm.kind = OpKind::kLayerNorm;
  norm.slots = slots::Norm::kCount;
  found = choose(norm);
  EXPECT_EQ(found.source, "default");
  EXPECT_EQ(found.use, std::vector<std::string>{"auto"});
}

TEST(KernelRules, AGradientStandsUnderItsOperation) {
  KernelMatch match;
  match.op = "attention";
  OpDesc op;
  op.kind = OpKind::kAttentionBackward;
  op.slots = slots::AttentionBackward::kCount;
  op.phase = Phase::kBackward;
  EXPECT_TRUE(match.matches(op, DeviceInfo{}));
  match.phases = {"backward"};
  EXPECT_TRUE(match.matches(op, DeviceInfo{}));
}

}  // namespace
}  // namespace xpuruntime

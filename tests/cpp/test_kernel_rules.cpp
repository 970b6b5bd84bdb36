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

TEST(KernelRules, Patterns) {
  struct Case {
    const char* pattern;
    const char* text;
    bool meant;
  };
  for (const Case& one : std::initializer_list<Case>{
           {"layers.*.attn", "layers.3.attn", true},
           {"layers.*.attn", "layers.3.x.attn", true},
           {"layers.*.attn", "layers.attn", false},
           {"*", "", true},
           {"", "", true},
           {"", "a", false},
           {"a?c", "abc", true},
           {"a?c", "ac", false},
           {"?", "\xC3\xA4", true},  // one character, two bytes
           {"??", "\xC3\xA4", false},
           {"[ab]c", "bc", true},
           {"[!ab]c", "bc", false},
           {"[!ab]c", "xc", true},
           {"[a-c]", "b", true},
           {"[c-a]", "b", false},
           {"[!c-a]", "b", true},
           {"[]]", "]", true},
           {"[]x]", "x", true},
           {"[!]]", "]", false},
           {"[", "[", true},
           {"[a", "[a", true},
           {"[!]", "[!]", true},
           {"[a-]", "-", true},
           {"[-a]", "-", true},
           {"[^a]", "^", true},
           {"[\xC3\xA4-\xC3\xBC]", "\xC3\xB6", true},
           {"a*b*c", "aXbYbZc", true},
           {"a*b*c", "aXbYbZ", false},
           {"**a", "ba", true},
           {"A", "a", false},
           {"a\nb*", "a\nbc", true},
           {"\xFF", "\xFF", true},
           {"?", "\xFF", true},
       }) {
    EXPECT_EQ(matches_pattern(one.pattern, one.text), one.meant)
        << one.pattern << " on " << one.text;
  }
  // Not exponential.
  const std::string text(2000, 'a');
  EXPECT_FALSE(matches_pattern("*a*a*a*a*a*a*a*a*b", text));
}

TEST(KernelRules, EveryKeyMustHold) {
  const OpDesc op = on_cuda();
  const auto holds = [&](const KernelMatch& match) {
    return match.matches(op, sm90(), "layers.0", "net.fc");
  };
  KernelMatch match;
  EXPECT_TRUE(holds(match));
  match.op = "matmul";
  match.m = IntRange{0, 16};
  match.n = IntRange{64, 64};
  match.k = IntRange{32};
  match.dtypes = {"fp16", "bf16"};
  match.device = "cuda";
  match.node = "layers.*";
  match.module = "net.?c";
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
  EXPECT_TRUE(fails([](auto& one) { one.node = "layers"; }));
  EXPECT_TRUE(fails([](auto& one) { one.module = "fc"; }));
  EXPECT_TRUE(fails([](auto& one) { one.phases = {"train", "backward"}; }));
  for (const char* device : {"cuda", "cuda:1", "sm90", "auto", ""}) {
    EXPECT_FALSE(fails([&](auto& one) { one.device = device; })) << device;
  }
  for (const char* device : {"sm80", "sm9", "sm900", "cud", "cuda:10", "cuda:"}) {
    EXPECT_TRUE(fails([&](auto& one) { one.device = device; })) << device;
  }
  KernelMatch named;
  named.node = "*";
  EXPECT_FALSE(named.matches(op, sm90(), "", "")) << "there is no name";
  KernelMatch arch;
  arch.device = "sm00";
  EXPECT_FALSE(arch.matches(matmul(1, 1, 1), DeviceInfo{}, "", "")) << "the CPU has none";
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
  const auto choose = [&](const OpDesc& op) { return rules.choose(op, DeviceInfo{}, "", ""); };
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
  EXPECT_TRUE(match.matches(op, DeviceInfo{}, "", ""));
  match.phases = {"backward"};
  EXPECT_TRUE(match.matches(op, DeviceInfo{}, "", ""));
}

}  // namespace
}  // namespace xpuruntime

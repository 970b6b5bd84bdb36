// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include "operands.h"
#include "xpuruntime/matmul_op.h"

namespace xpuruntime {
namespace {

using namespace testing;
using Slot = slots::Matmul;

constexpr DType kFp8{10, 8, 1};

OpCall make(const Operand& a, const Operand& b, const MatmulOptions& options = {}) {
  OpCall call = make_matmul({a, b, none("bias"), none("scale_a"), none("scale_b")}, options);
  call.set_output(call.outputs()[0], made_for(call.outputs()[0], a.device));
  return call;
}

std::string described(const Operand& a, const Operand& b) {
  const OpCall call = make(a, b);
  return dims(call.desc[Slot::kA]) + " " + dims(call.desc[Slot::kB]) + " " +
         dims(call.desc[Slot::kOut]);
}

TEST(MatmulOp, BatchesOfAJoinIntoRows) {
  EXPECT_EQ(described(operand("a", {4, 5}), operand("b", {5, 6})), "4,5/5,1 5,6/6,1 4,6/6,1");
  EXPECT_EQ(described(operand("a", {2, 3, 4, 5}), operand("b", {5, 6})),
            "24,5/5,1 5,6/6,1 24,6/6,1");
  EXPECT_EQ(described(operand("a", {3, 4, 5}), operand("b", {1, 1, 5, 6})),
            "12,5/5,1 5,6/6,1 12,6/6,1");
  EXPECT_EQ(described(with_strides(operand("a", {3, 4, 5}), {80, 20, 1}), operand("b", {5, 6})),
            "12,5/20,1 5,6/6,1 12,6/6,1");
  EXPECT_EQ(described(with_strides(operand("a", {3, 4, 5}), {81, 20, 1}), operand("b", {5, 6})),
            "3,4,5/81,20,1 5,6/6,1 3,4,6/24,6,1");
  EXPECT_EQ(described(with_strides(operand("a", {4, 5}), {1, 4}), operand("b", {5, 6})),
            "4,5/1,4 5,6/6,1 4,6/6,1");
}

TEST(MatmulOp, WholeBatchesBroadcast) {
  EXPECT_EQ(described(operand("a", {4, 5}), operand("b", {2, 3, 5, 6})),
            "4,5/5,1 6,5,6/30,6,1 6,4,6/24,6,1");
  EXPECT_EQ(described(operand("a", {3, 4, 5}), operand("b", {3, 5, 6})),
            "3,4,5/20,5,1 3,5,6/30,6,1 3,4,6/24,6,1");
  EXPECT_EQ(described(with_strides(operand("a", {3, 4, 5}), {0, 5, 1}), operand("b", {3, 5, 6})),
            "3,4,5/0,5,1 3,5,6/30,6,1 3,4,6/24,6,1");
  EXPECT_EQ(described(operand("a", {0, 4, 5}), operand("b", {0, 5, 6})).substr(0, 5), "0,4,5");
}

TEST(MatmulOp, PartsOfBatchesDoNot) {
  expect_refused([] { make(operand("a", {2, 3, 4, 5}), operand("b", {3, 5, 6})); },
                 "'b' [3, 5, 6] float32 on cuda:0 would have to be repeated");
  expect_refused([] { make(operand("a", {3, 4, 5}), operand("b", {2, 5, 6})); },
                 "have batch dimensions that do not broadcast");
}

TEST(MatmulOp, TheResultHasTheDtypeThatIsAsked) {
  const auto dtype = [](DType of, std::optional<DType> asked) {
    MatmulOptions options;
    options.out_dtype = asked;
    return make(operand("a", {4, 8}, of), operand("b", {8, 4}, of), options).desc[Slot::kOut].dtype;
  };
  EXPECT_EQ(dtype(kBf16, std::nullopt), kBf16);
  EXPECT_EQ(dtype(kBf16, kF32), kF32);
  EXPECT_EQ(dtype(kFp8, std::nullopt), kBf16);
  EXPECT_EQ(dtype(kFp8, kF16), kF16);
  expect_refused([&] { dtype(kF32, kF16); }, "out_dtype float16 is not possible");
  expect_refused([&] { dtype(kBf16, kF16); }, "leave it out, or ask for float32");
  expect_refused([&] { dtype(kFp8, kFp8); }, "is not possible");
}

TEST(MatmulOp, TensorCoresRoundOnlyWhatHas32Bits) {
  MatmulOptions options;
  options.allow_tf32 = options.deterministic = true;
  EXPECT_TRUE(make(operand("a", {2, 2}), operand("b", {2, 2}), options).desc.attributes.allow_tf32);
  const OpCall half = make(operand("a", {2, 2}, kF16), operand("b", {2, 2}, kF16), options);
  EXPECT_FALSE(half.desc.attributes.allow_tf32);
  EXPECT_TRUE(half.desc.attributes.deterministic);
}

TEST(MatmulOp, RefusalsNameTheArgument) {
  const Operand a = operand("a", {4, 5});
  const Operand b = operand("b", {5, 6});
  expect_refused([&] { make(none("a"), b); }, "the argument 'a' is missing");
  expect_refused([&] { make(a, none("b")); }, "the argument 'b' is missing");
  expect_refused([&] { make(operand("a", {5}), b); }, "'a' [5] float32 on cuda:0 has fewer than 2");
  expect_refused([&] { make(a, operand("b", {6, 5})); }, "the last dimension of 'a' (5) must be");
  expect_refused([&] { make(a, operand("b", {5, 6}, kF16)); },
                 "'b' [5, 6] float16 on cuda:0 has another dtype");
  expect_refused(
      [&] { make(a, operand("b", {5, 6}, kF32, kCuda1)); },
      "'b' [5, 6] float32 on cuda:1 is on another device than 'a' [4, 5] float32 on cuda:0");
  expect_refused([&] { make(a, operand("b", {5, 6}, kF32, kCpu)); }, "on cpu is on another device");
  expect_refused([&] { make(operand("a", {4, 5}, {0, 32, 1}), b); },
                 "has a dtype that is not multiplied");
  const auto with = [&](const Operand& bias, const Operand& scale) {
    return refusal([&] { (void)make_matmul({a, b, bias, scale, none("scale_b")}, {}); });
  };
  EXPECT_EQ(with(operand("bias", {6}), none("scale_a")), "");
  EXPECT_NE(with(operand("bias", {5}), none("scale_a")).find("'bias' [5]"), std::string::npos);
  EXPECT_NE(with(operand("bias", {6}, kF32, kCpu), none("scale_a")).find("another device"),
            std::string::npos);
  EXPECT_NE(with(none("bias"), operand("scale_a", {1})).find("only float8"), std::string::npos);
}

}  // namespace
}  // namespace xpuruntime

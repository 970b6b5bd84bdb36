// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include "operands.h"
#include "xpuruntime/norm_op.h"

namespace xpuruntime {
namespace {

using namespace testing;
using Slot = slots::Norm;

NormInputs inputs(const Operand& x) { return {x, none("residual"), none("weight"), none("bias")}; }

TEST(NormOp, RowsAndColumns) {
  NormInputs given = inputs(operand("x", {2, 3, 8}, kF16));
  given.weight = operand("weight", {8});
  NormOptions options;
  options.want_stats = options.deterministic = true;
  OpCall call = make_norm(given, options);
  EXPECT_EQ(dims(call.desc[Slot::kX]), "6,8/8,1");
  EXPECT_TRUE(call.desc.attributes.deterministic);
  ASSERT_EQ(call.outputs().size(), 3U);
  EXPECT_EQ(call.outputs()[1].rank, 2);
  for (const OutputSpec& spec : call.outputs()) call.set_output(spec, made_for(spec));
  EXPECT_EQ(dims(call.desc[Slot::kY]), "6,8/8,1");
  EXPECT_EQ(dims(call.desc[Slot::kMean]), "6/1");
  options.rms = true;
  EXPECT_EQ(make_norm(given, options).outputs().size(), 2U);
  EXPECT_EQ(dims(make_norm(inputs(operand("x", {8})), {}).desc[Slot::kX]), "1,8/8,1");
  EXPECT_EQ(dims(make_norm(inputs(operand("x", {0, 8})), {}).desc[Slot::kX]), "0,8/8,1");
}

TEST(NormOp, RefusalsNameTheArgument) {
  const Operand x = operand("x", {4, 8});
  const auto said = [&](auto change, NormOptions options = {}) {
    NormInputs given = inputs(x);
    change(given, options);
    return refusal([&] { (void)make_norm(given, options); });
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(said([](auto& in, auto&) { in.x = operand("x", {}); }), "expected [.., columns]");
  expect(said([](auto& in, auto&) { in.x = operand("x", {4, 0}); }), "has no columns");
  expect(said([](auto& in, auto&) { in.residual = operand("residual", {4, 8}, kF16); }),
         "'residual' [4, 8] float16");
  expect(said([](auto& in, auto&) { in.residual = operand("residual", {8}); }),
         "another shape than 'x'");
  expect(said([](auto& in, auto&) { in.weight = operand("weight", {4}); }),
         "'weight' [4] float32 on cuda:0 must be [8]");
  expect(said([](auto& in, auto&) { in.weight = operand("weight", {8}, kF16); }),
         "must be float32");
  expect(said([](auto& in, auto&) { in.weight = operand("weight", {8}, kF32, kCpu); }),
         "another device than 'x'");
  expect(said([](auto& in, auto& options) {
           in.bias = operand("bias", {8});
           options.rms = true;
         }),
         "has no bias");
  expect(said([](auto&, auto& options) { options.want_sum = true; }), "without 'residual'");
  expect(said([](auto&, auto& options) { options.epsilon = -1.0F; }), "eps is -1");
}

TEST(NormOp, Backward) {
  NormBackwardInputs given{operand("grad_out", {2, 3, 8}), operand("x", {2, 3, 8}),
                           operand("weight", {8}),         operand("mean", {2, 3}),
                           operand("rstd", {2, 3}),        none("grad_sum")};
  NormBackwardOptions options;
  options.want_weight = options.want_bias = true;
  OpCall call = make_norm_backward(given, options);
  EXPECT_EQ(call.outputs().size(), 3U);
  EXPECT_EQ(dims(call.desc[slots::NormBackward::kMean]), "6/1");
  call.set_output(call.outputs()[0], given.x);  // the gradient may take the place of what was read
  call.set_output(call.outputs()[0], given.grad_y);
  options.rms = true;
  expect_refused([&] { (void)make_norm_backward(given, options); },
                 "'mean' [2, 3] float32 on cuda:0 is given to rms_norm");
  given.mean = none("mean");
  expect_refused([&] { (void)make_norm_backward(given, options); },
                 "grad_bias is asked of rms_norm");
  options.rms = false;
  expect_refused([&] { (void)make_norm_backward(given, options); },
                 "the argument 'mean' is missing");
  given.mean = operand("mean", {3, 2});
  expect_refused([&] { (void)make_norm_backward(given, options); }, "'mean' [3, 2]");
  given.mean = operand("mean", {2, 3});
  given.weight = none("weight");
  expect_refused([&] { (void)make_norm_backward(given, options); }, "without 'weight'");
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>

#include "operands.h"
#include "xpuruntime/conv_op.h"

namespace xpuruntime {
namespace {

using namespace testing;

OpCall make(const ConvOptions& options, const Operand& x = operand("x", {2, 4, 9, 7}),
            const Operand& weight = operand("weight", {6, 4, 3, 3}),
            const Operand& bias = none("bias")) {
  return make_conv({x, weight, bias}, options);
}

TEST(ConvOp, SizesOfTheResult) {
  const auto size = [](std::array<std::int32_t, 2> stride, std::array<std::int32_t, 4> padding,
                       std::array<std::int32_t, 2> dilation) {
    ConvOptions options;
    options.stride = stride;
    options.padding = padding;
    options.dilation = dilation;
    const OpCall call = make(options);
    return std::pair{call.outputs()[0].shape[2], call.outputs()[0].shape[3]};
  };
  EXPECT_EQ(size({1, 1}, {0, 0, 0, 0}, {1, 1}), std::pair(7L, 5L));
  EXPECT_EQ(size({2, 3}, {1, 1, 1, 1}, {1, 1}), std::pair(5L, 3L));
  EXPECT_EQ(size({1, 1}, {1, 0, 2, 4}, {1, 1}), std::pair(10L, 9L));
  EXPECT_EQ(size({1, 1}, {0, 0, 0, 0}, {4, 3}), std::pair(1L, 1L));
  expect_refused([&] { size({1, 1}, {0, 0, 0, 0}, {4, 4}); },
                 "reaches over 9 elements, more than the 7 of 'x'");
}

TEST(ConvOp, ChannelsLastStays) {
  const Operand last = with_strides(operand("x", {2, 4, 9, 7}), {252, 1, 28, 4});
  EXPECT_TRUE(is_channels_last(last));
  EXPECT_TRUE(make({}, last).outputs()[0].channels_last);
  EXPECT_FALSE(make({}).outputs()[0].channels_last);
  EXPECT_FALSE(is_channels_last(with_strides(operand("x", {2, 1, 9, 7}), {63, 1, 7, 1})));
}

TEST(ConvOp, RefusalsNameTheArgument) {
  const auto with = [](auto change) {
    ConvOptions options;
    change(options);
    return [options] { (void)make(options); };
  };
  expect_refused(with([](auto& o) { o.stride = {1, 0}; }), "stride has 0");
  expect_refused(with([](auto& o) { o.dilation = {-1, 1}; }), "dilation has -1");
  expect_refused(with([](auto& o) { o.groups = 0; }), "groups has 0");
  expect_refused(with([](auto& o) { o.groups = 3; }), "groups is 3, which divides not both");
  expect_refused(with([](auto& o) { o.groups = 2; }), "its dimension 1 must be 2");
  expect_refused(with([](auto& o) { o.padding = {0, -1, 0, 0}; }), "padding has -1");
  const Operand x = operand("x", {2, 4, 9, 7});
  expect_refused([&] { make({}, operand("x", {4, 9, 7})); }, "'x' [4, 9, 7]");
  expect_refused([&] { make({}, x, operand("weight", {6, 4, 3, 3}, kF32, kCuda1)); }, "'weight'");
  expect_refused([&] { make({}, x, operand("weight", {6, 4, 0, 3})); }, "has an empty kernel");
  expect_refused([&] { make({}, x, operand("weight", {6, 4, 3, 3}), operand("bias", {4})); },
                 "'bias' [4] float32 on cuda:0 must be [6]");
}

ConvOptions strided() {
  ConvOptions options;
  options.stride = {2, 1};
  options.padding = {1, 0, 0, 2};
  options.groups = 2;
  options.allow_tf32 = true;
  return options;
}

TEST(ConvOp, GradientsHaveTheShapesOfWhatTheyAreOf) {
  const Operand grad = operand("grad_out", {2, 6, 4, 7});
  const OpCall input =
      make_conv_input_gradient(grad, operand("weight", {6, 2, 3, 3}), {9, 7}, strided());
  EXPECT_EQ(input.desc.kind, OpKind::kConvInputGradient);
  EXPECT_EQ(input.desc.phase, Phase::kBackward);
  EXPECT_EQ(policy_key(input.desc.kind), "conv");
  EXPECT_EQ(facts_of(input.desc).dtype, "tf32");
  ASSERT_EQ(input.outputs().size(), 1U);
  const auto same = [](const OutputSpec& spec, std::initializer_list<std::int64_t> shape) {
    return std::equal(spec.dims().begin(), spec.dims().end(), shape.begin(), shape.end());
  };
  EXPECT_TRUE(same(input.outputs()[0], {2, 4, 9, 7}));
  // A height of 8 has the same result: only the call can say which it was.
  EXPECT_TRUE(
      same(make_conv_input_gradient(grad, operand("weight", {6, 2, 3, 3}), {8, 7}, strided())
               .outputs()[0],
           {2, 4, 8, 7}));
  const OpCall weight =
      make_conv_weight_gradient(grad, operand("x", {2, 4, 9, 7}), {3, 3}, strided());
  EXPECT_EQ(weight.desc.kind, OpKind::kConvWeightGradient);
  EXPECT_TRUE(same(weight.outputs()[0], {6, 2, 3, 3}));
  EXPECT_FALSE(weight.outputs()[0].channels_last);
  const Operand last = with_strides(operand("x", {2, 4, 9, 7}), {252, 1, 28, 4});
  EXPECT_TRUE(make_conv_weight_gradient(grad, last, {3, 3}, strided()).outputs()[0].channels_last);
}

TEST(ConvOp, GradientsAreDescribedByTheConvolution) {
  OpCall call = make_conv_weight_gradient(operand("grad_out", {2, 6, 4, 7}),
                                          operand("x", {2, 4, 9, 7}), {3, 3}, strided());
  call.set(slots::ConvWeightGradient::kGradWeight, operand("grad_weight", {6, 2, 3, 3}));
  EXPECT_EQ(describe(call.desc),
            "conv_weight_gradient tf32 [2, 4, 9, 7] * [6, 2, 3, 3], stride 2x1, padding 1,0,0,2, "
            "groups 2, cuda:0");
  EXPECT_NE(to_key(call.desc).find("groups=2;stride=2x1;dilation=1x1;padding=1,0,0,2"),
            std::string::npos);
}

TEST(ConvOp, RefusalsOfGradientsNameTheArgument) {
  const Operand grad = operand("grad_out", {2, 6, 7, 5});
  const Operand weight = operand("weight", {6, 4, 3, 3});
  const Operand x = operand("x", {2, 4, 9, 7});
  const auto input = [](const Operand& arriving, const Operand& by,
                        std::array<std::int32_t, 2> size = {9, 7}, ConvOptions options = {}) {
    return [=] { (void)make_conv_input_gradient(arriving, by, size, options); };
  };
  const auto weights = [](const Operand& arriving, const Operand& by,
                          std::array<std::int32_t, 2> size = {3, 3}, ConvOptions options = {}) {
    return [=] { (void)make_conv_weight_gradient(arriving, by, size, options); };
  };
  input(grad, weight)();
  weights(grad, x)();
  expect_refused(input(grad, weight, {10, 7}), "height 10 with a kernel of 3 gives 8");
  expect_refused(input(grad, weight, {9, 2}), "width 2 with a kernel of 3 gives nothing");
  expect_refused(input(grad, weight, {-1, 7}), "input_size has -1");
  expect_refused(input(operand("grad_out", {2, 5, 7, 5}), weight), "its dimension 1 must be 6");
  expect_refused(input(grad, operand("weight", {6, 4, 3, 3}, kF16)), "another dtype");
  expect_refused(input(none("grad_out"), weight), "'grad_out' is missing");
  expect_refused(input(operand("grad_out", {6, 7, 5}), weight), "'grad_out' [6, 7, 5]");
  ConvOptions relu;
  relu.activation = Activation::kRelu;
  expect_refused(input(grad, weight, {9, 7}, relu), "with the activation 'relu'");
  ConvOptions thirds;
  thirds.groups = 4;
  expect_refused(input(grad, weight, {9, 7}, thirds), "groups is 4, which does not divide");
  thirds.groups = 3;
  expect_refused(weights(grad, x, {3, 3}, thirds), "does not divide dimension 1 of 'x'");
  expect_refused(weights(grad, x, {0, 3}), "kernel_size has 0");
  expect_refused(weights(grad, operand("x", {3, 4, 9, 7})), "its dimension 0 must be 3");
  expect_refused(weights(grad, operand("x", {2, 4, 9, 7}, kF32, kCuda1)), "another device");
}

}  // namespace
}  // namespace xpuruntime

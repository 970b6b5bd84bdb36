// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace xpuruntime

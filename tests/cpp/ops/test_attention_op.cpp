// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <limits>

#include "operands.h"
#include "xpuruntime/attention_op.h"

namespace xpuruntime {
namespace {

using namespace testing;

AttentionInputs inputs(const Operand& mask = none("mask"), const Operand& rng = none("rng")) {
  return {operand("q", {2, 6, 5, 64}, kBf16), operand("k", {2, 3, 7, 64}, kBf16),
          operand("v", {2, 3, 7, 64}, kBf16), mask, rng};
}

TEST(AttentionOp, Describes) {
  AttentionOptions options;
  options.want_lse = true;
  options.causal = Causal::kBottomRight;
  const OpCall call = make_attention(inputs(), options);
  EXPECT_EQ(call.desc.kind, OpKind::kAttention);
  EXPECT_DOUBLE_EQ(call.desc.attributes.scale, 0.125);
  EXPECT_EQ(call.desc.attributes.causal, Causal::kBottomRight);
  EXPECT_FALSE(call.desc.has(slots::Attention::kMask));
  ASSERT_EQ(call.outputs().size(), 2U);
  EXPECT_EQ(call.outputs()[0].dtype, kBf16);
  EXPECT_EQ(call.outputs()[1].dtype, kF32);
  EXPECT_EQ(call.outputs()[1].rank, 3);
}

TEST(AttentionOp, MasksHaveFourDimensions) {
  const auto mask = [](std::initializer_list<std::int64_t> shape, DType dtype) {
    return dims(
        make_attention(inputs(operand("mask", shape, dtype)), {}).desc[slots::Attention::kMask]);
  };
  constexpr DType kBool{6, 8, 1};
  EXPECT_EQ(mask({5, 7}, kBool), "1,1,5,7/35,35,7,1");
  EXPECT_EQ(mask({2, 1, 1, 7}, kF32), "2,1,1,7/7,7,7,1");
  EXPECT_EQ(mask({7}, kBf16), "1,1,1,7/7,7,7,1");
  expect_refused([&] { mask({5, 8}, kBool); }, "does not broadcast to [2, 6, 5, 7]");
  expect_refused([&] { mask({5, 7}, kF16); }, "'mask' [5, 7] float16 on cuda:0 must be bool");
}

TEST(AttentionOp, DropoutNeedsItsNumbers) {
  AttentionOptions options;
  options.dropout_p = 0.5F;
  expect_refused([&] { (void)make_attention(inputs(), options); },
                 "dropout_p is given without 'rng'");
  const Operand rng = operand("rng", {2}, {0, 64, 1});
  EXPECT_TRUE(make_attention(inputs(none("mask"), rng), options).desc.has(slots::Attention::kRng));
  options.dropout_p = 0.0F;
  EXPECT_FALSE(make_attention(inputs(none("mask"), rng), options).desc.has(slots::Attention::kRng));
  for (const float wrong : {-0.1F, 1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    options.dropout_p = wrong;
    expect_refused([&] { (void)make_attention(inputs(none("mask"), rng), options); },
                   "expected 0 <= dropout_p < 1");
  }
}

TEST(AttentionOp, Backward) {
  const AttentionInputs given = inputs();
  const Operand out = operand("out", {2, 6, 5, 64}, kBf16);
  const Operand grad = operand("grad_out", {2, 6, 5, 64}, kBf16);
  const Operand lse = operand("lse", {2, 6, 5});
  OpCall call = make_attention_backward(grad, given, out, lse, {});
  EXPECT_EQ(call.desc.phase, Phase::kBackward);
  ASSERT_EQ(call.outputs().size(), 3U);
  EXPECT_EQ(call.outputs()[1].shape[1], 3);
  // Parts of one packed array are each other's neighbours, and share nothing.
  Operand packed = operand("packed", {2, 5, 12, 64}, kBf16);
  Operand grad_q = with_strides(operand("grad_q", {2, 6, 5, 64}, kBf16), {3840, 64, 768, 1});
  Operand other = with_strides(operand("other", {2, 6, 5, 64}, kBf16), {3840, 64, 768, 1});
  grad_q.data = packed.data;
  other.data = static_cast<char*>(packed.data) + 6 * 64 * 2;
  call.set_output(call.outputs()[0], grad_q);
  Operand same = made_for(call.outputs()[1]);
  same.data = grad_q.data;
  expect_refused([&] { call.set_output(call.outputs()[1], same); },
                 "shares memory with the result 'grad_q'");
  AttentionInputs square = given;
  square.k = operand("k", {2, 6, 5, 64}, kBf16);
  square.v = operand("v", {2, 6, 5, 64}, kBf16);
  OpCall even = make_attention_backward(grad, square, out, lse, {});
  even.set_output(even.outputs()[0], grad_q);
  even.set_output(even.outputs()[1], other);
  expect_refused(
      [&] { (void)make_attention_backward(grad, given, out, operand("lse", {2, 6, 4}), {}); },
      "'lse' [2, 6, 4] float32 on cuda:0 does not fit: its dimension 2 must be 5");
  expect_refused(
      [&] { (void)make_attention_backward(grad, given, out, operand("lse", {2, 6, 5}, kF16), {}); },
      "'lse' [2, 6, 5] float16 on cuda:0 must be float32");
}

TEST(AttentionOp, RefusalsNameTheArgument) {
  AttentionInputs given = inputs();
  given.k = operand("k", {2, 4, 7, 64}, kBf16);
  given.v = operand("v", {2, 4, 7, 64}, kBf16);
  expect_refused(
      [&] { (void)make_attention(given, {}); },
      "'q' [2, 6, 5, 64] bfloat16 on cuda:0 has 6 heads, which is no multiple of the 4 heads");
  given = inputs();
  given.v = operand("v", {2, 3, 7, 64}, kBf16, kCuda1);
  expect_refused([&] { (void)make_attention(given, {}); },
                 "'v' [2, 3, 7, 64] bfloat16 on cuda:1 is on another");
  given = inputs();
  given.v = operand("v", {2, 3, 8, 64}, kBf16);
  expect_refused([&] { (void)make_attention(given, {}); },
                 "its dimension 2 must be 7, the length of 'k'");
  AttentionOptions options;
  options.scale = std::numeric_limits<float>::infinity();
  expect_refused([&] { (void)make_attention(inputs(), options); }, "scale is inf");
}

}  // namespace
}  // namespace xpuruntime

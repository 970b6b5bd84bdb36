// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "fake_kernels.h"
#include "xpuruntime/op.h"

namespace xpuruntime {
namespace {

using testing::matmul;

TEST(Op, NamesAndSlots) {
  for (std::size_t i = 0; i < kOpKinds; ++i) {
    const auto kind = static_cast<OpKind>(i);
    EXPECT_EQ(parse_op_kind(to_string(kind)), kind);
    ASSERT_LE(slot_count(kind), kMaxSlots);
    std::set<std::string_view> names;
    bool outputs_begun = false;
    for (std::size_t slot = 0; slot < slot_count(kind); ++slot) {
      EXPECT_FALSE(slot_name(kind, slot).empty());
      EXPECT_TRUE(names.insert(slot_name(kind, slot)).second) << slot_name(kind, slot);
      EXPECT_FALSE(outputs_begun && !is_output(kind, slot)) << "inputs come first";
      outputs_begun = outputs_begun || is_output(kind, slot);
    }
    EXPECT_TRUE(outputs_begun);
    EXPECT_FALSE(is_output(kind, slot_count(kind)));
    EXPECT_TRUE(slot_name(kind, slot_count(kind)).empty() || slot_count(kind) == kMaxSlots);
  }
  EXPECT_EQ(slot_name(OpKind::kAttentionBackward, slots::AttentionBackward::kGradV), "grad_v");
  EXPECT_EQ(slot_name(OpKind::kRmsNormBackward, slots::NormBackward::kGradSum), "grad_sum");
  EXPECT_EQ(policy_key(OpKind::kAttentionBackward), "attention");
  EXPECT_EQ(policy_key(OpKind::kConvWeightGradient), "conv");
  EXPECT_EQ(policy_key(OpKind::kRmsNormBackward), "rms_norm");
  EXPECT_THROW(parse_op_kind("matmull"), InputError);
  EXPECT_EQ(parse_activation("gelu_tanh"), Activation::kGeluTanh);
  EXPECT_THROW(parse_activation("swish"), InputError);
}

TEST(Op, EqualityFollowsWhatIsPresent) {
  const OpDesc one = matmul(2, 3, 4);
  OpDesc two = one;
  EXPECT_EQ(one, two);
  two.tensors[slots::Matmul::kBias].shape[0] = 7;  // absent: of no account
  EXPECT_EQ(one, two);
  EXPECT_EQ(hash_value(one), hash_value(two));
  two.tensors[slots::Matmul::kBias].present = 1;
  EXPECT_FALSE(one == two);
  two = one;
  two.tensors[slots::Matmul::kA].alignment = 4;
  EXPECT_FALSE(one == two);
  two = one;
  two.attributes.scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(two, two) << "or its choice would never be found again";
}

// Each change of one field makes another operation, another hash and another key.
TEST(Op, EveryFieldCounts) {
  std::vector<OpDesc> all{matmul(2, 3, 4)};
  const auto vary = [&](auto change) {
    all.push_back(all.front());
    change(all.back());
  };
  vary([](OpDesc& op) { op.phase = Phase::kTrain; });
  vary([](OpDesc& op) { op.attributes.scale = 0.5F; });
  vary([](OpDesc& op) { op.attributes.epsilon = 0.5F; });
  vary([](OpDesc& op) { op.attributes.dropout_p = 0.5F; });
  vary([](OpDesc& op) { op.attributes.activation = Activation::kRelu; });
  vary([](OpDesc& op) { op.attributes.causal = Causal::kTopLeft; });
  vary([](OpDesc& op) { op.attributes.causal = Causal::kBottomRight; });
  vary([](OpDesc& op) { op.attributes.allow_tf32 = true; });
  vary([](OpDesc& op) { op.attributes.deterministic = true; });
  for (std::size_t slot : {slots::Matmul::kA, slots::Matmul::kB, slots::Matmul::kOut}) {
    for (std::size_t dim : {0U, 1U}) {
      vary([&](OpDesc& op) { op.tensors[slot].shape[dim] += 1; });
      vary([&](OpDesc& op) { op.tensors[slot].strides[dim] += 64; });
    }
    vary([&](OpDesc& op) { op.tensors[slot].alignment = 2; });
    vary([&](OpDesc& op) { op.tensors[slot].dtype = parse_dtype("float16"); });
  }
  vary([](OpDesc& op) { op.tensors[slots::Matmul::kBias] = op.tensors[slots::Matmul::kOut]; });
  vary([](OpDesc& op) { op.tensors[slots::Matmul::kScaleA] = op.tensors[slots::Matmul::kOut]; });
  std::set<std::size_t> hashes;
  std::set<std::string> keys;
  for (const OpDesc& op : all) {
    hashes.insert(hash_value(op));
    keys.insert(to_key(op));
  }
  EXPECT_EQ(hashes.size(), all.size());
  EXPECT_EQ(keys.size(), all.size());
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_FALSE(all[0] == all[i]) << to_key(all[i]);

  OpDesc conv;
  conv.kind = OpKind::kConv;
  conv.slots = slots::Conv::kCount;
  conv.attributes.groups = 1;
  std::set<std::string> convs{to_key(conv)};
  for (std::int32_t* field :
       {&conv.attributes.groups, conv.attributes.stride.data(), conv.attributes.dilation.data() + 1,
        conv.attributes.padding.data() + 3}) {
    ++*field;
    EXPECT_TRUE(convs.insert(to_key(conv)).second) << to_key(conv);
  }
}

TEST(Op, HashesSpread) {
  std::set<std::size_t> low_bits;
  for (std::int64_t m = 0; m < 4096; ++m) low_bits.insert(hash_value(matmul(m, 64, 64)) & 0xFFFFU);
  // Of 4096 random numbers below 65536 about 126 collide.
  EXPECT_GT(low_bits.size(), 3850U);
}

TEST(Op, KeyLeavesTheDeviceOut) {
  const OpDesc one = matmul(2, 3, 4, parse_dtype("bfloat16"), {DeviceType::kCuda, 0});
  OpDesc two = one;
  two.device.index = 1;
  EXPECT_EQ(to_key(one), to_key(two));
  EXPECT_FALSE(one == two);
  EXPECT_EQ(to_key(one),
            "matmul;infer;a=bfloat16[2,4](4,1)@8;b=bfloat16[4,3](3,1)@8;out=bfloat16[2,3](3,1)@8");
}

TEST(Op, Facts) {
  OpFacts facts = facts_of(matmul(5, 6, 7, parse_dtype("bfloat16")));
  EXPECT_EQ(facts.m, 5);
  EXPECT_EQ(facts.n, 6);
  EXPECT_EQ(facts.k, 7);
  EXPECT_EQ(facts.head_dim, -1);
  EXPECT_EQ(facts.dtype, "bf16");
  OpDesc op = matmul(0, 6, 7);
  EXPECT_EQ(facts_of(op).m, 0);
  EXPECT_EQ(facts_of(op).dtype, "fp32");
  op.attributes.allow_tf32 = true;
  EXPECT_EQ(facts_of(op).dtype, "tf32");
  for (const auto& [name, word] :
       std::vector<std::pair<std::string, std::string>>{{"float64", "fp64"},
                                                        {"float16", "fp16"},
                                                        {"float8_e4m3fn", "fp8"},
                                                        {"float8_e5m2", "fp8"},
                                                        {"int8", "int8"},
                                                        {"int64", ""},
                                                        {"bool", ""}}) {
    EXPECT_EQ(facts_of(matmul(1, 1, 1, parse_dtype(name))).dtype, word) << name;
  }
  OpDesc attention;
  attention.kind = OpKind::kAttentionBackward;
  attention.slots = slots::AttentionBackward::kCount;
  TensorDesc& q = attention.tensors[slots::AttentionBackward::kQ];
  q = {parse_dtype("float16"), 1, 4, 8, 0, {1, 2, 3, 64}, {384, 192, 64, 1}};
  EXPECT_EQ(facts_of(attention).head_dim, 64);
  EXPECT_EQ(facts_of(attention).dtype, "fp16");
  EXPECT_EQ(facts_of(attention).m, -1);
}

TEST(Op, Describes) {
  OpDesc op = matmul(16, 4096, 512, parse_dtype("bfloat16"), {DeviceType::kCuda, 0});
  EXPECT_EQ(describe(op), "matmul bf16 [16, 512] x [512, 4096], cuda:0");
  TensorDesc& b = op.tensors[slots::Matmul::kB];
  b.strides = {1, 512};
  op.tensors[slots::Matmul::kBias] = {b.dtype, 1, 1, 8, 0, {4096}, {1}};
  op.attributes.activation = Activation::kGelu;
  EXPECT_EQ(describe(op), "matmul bf16 [16, 512] x [4096, 512]^T + bias, gelu, cuda:0");
  for (std::size_t kind = 0; kind < kOpKinds; ++kind) {  // nothing given: still no trouble
    OpDesc bare;
    bare.kind = static_cast<OpKind>(kind);
    bare.slots = static_cast<std::uint8_t>(slot_count(bare.kind));
    EXPECT_TRUE(describe(bare).starts_with(to_string(bare.kind)));
    EXPECT_TRUE(to_key(bare).starts_with(to_string(bare.kind)));
  }
}

}  // namespace
}  // namespace xpuruntime

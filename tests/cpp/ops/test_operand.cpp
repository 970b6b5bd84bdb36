// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "memory/memory_overlap.h"
#include "operands.h"

namespace xpuruntime {
namespace {

using namespace testing;

TEST(Operand, SaysWhatItIs) {
  EXPECT_EQ(describe(operand("a", {2, 3})), "'a' [2, 3] float32 on cuda:0");
  EXPECT_EQ(describe(operand("q", {}, kBf16, kCpu)), "'q' [] bfloat16 on cpu");
  EXPECT_EQ(operand("a", {2, 3, 4}).elements(), 24);
  EXPECT_EQ(operand("a", {2, 3, 4}).size(0), 4);
  EXPECT_EQ(operand("a", {2, 3, 4}).stride(2), 12);
}

TEST(Operand, LeadingDimensionsJoin) {
  const auto joined = [](const Operand& from, std::size_t keep) {
    const Operand made = join_leading(from, keep);
    return std::vector<std::int64_t>{made.rank, made.shape[0], made.strides[0]};
  };
  using Three = std::vector<std::int64_t>;
  EXPECT_EQ(joined(operand("a", {2, 3, 4}), 1), (Three{2, 6, 4}));
  EXPECT_EQ(joined(operand("a", {2, 3, 4}), 2), (Three{3, 2, 12}));
  EXPECT_EQ(joined(operand("a", {4}), 1), (Three{2, 1, 0}));
  EXPECT_EQ(joined(operand("a", {}), 0), (Three{1, 1, 0}));
  EXPECT_EQ(joined(operand("a", {2, 3}), 0), (Three{1, 6, 1}));
  EXPECT_EQ(joined(with_strides(operand("a", {2, 1, 3, 4}), {30, 99, 10, 1}), 1),
            (Three{2, 6, 10}));
  EXPECT_EQ(joined(with_strides(operand("a", {2, 3, 4}), {0, 0, 1}), 1), (Three{2, 6, 0}));
  EXPECT_EQ(joined(operand("a", {0, 3, 4}), 1)[1], 0);
  EXPECT_EQ(joined(operand("a", {3, 0, 4}), 1)[1], 0);
  expect_refused([] { (void)join_leading(with_strides(operand("a", {2, 3, 4}), {16, 4, 1}), 1); },
                 "'a' [2, 3, 4] float32 on cuda:0 has leading dimensions that cannot be joined");
  expect_refused([] { (void)join_leading(with_strides(operand("a", {2, 3, 4}), {0, 4, 1}), 1); },
                 "cannot be joined without a copy");
}

TEST(Operand, DimensionsOfOneHaveOneStride) {
  OpCall call;
  call.begin(OpKind::kMatmul, slots::Matmul::kCount, kCuda0);
  const auto described = [&](const Operand& from) {
    call.set(slots::Matmul::kA, from);
    return dims(call.desc[slots::Matmul::kA]);
  };
  EXPECT_EQ(described(with_strides(operand("a", {1, 5}), {77, 1})), "1,5/5,1");
  EXPECT_EQ(described(with_strides(operand("a", {1, 5}), {77, 3})), "1,5/1,3");
  EXPECT_EQ(described(with_strides(operand("a", {5, 1}), {3, 77})), "5,1/3,1");
  EXPECT_EQ(described(with_strides(operand("a", {1, 1}), {7, 7})), "1,1/1,1");
  EXPECT_EQ(described(with_strides(operand("a", {2, 1, 5}), {40, 9, 1})), "2,1,5/40,5,1");
}

TEST(Operand, AlignmentIsThatOfTheAddress) {
  OpCall call;
  call.begin(OpKind::kMatmul, slots::Matmul::kCount, kCuda0);
  for (const auto& [offset, power] : {std::pair{0, 8}, {4, 2}, {16, 4}, {128, 7}, {256, 8}}) {
    Operand a = operand("a", {2, 2});
    a.data = static_cast<char*>(a.data) + offset;
    call.set(slots::Matmul::kA, a);
    EXPECT_EQ(call.desc[slots::Matmul::kA].alignment, power);
  }
  Operand odd = operand("a", {2, 2});
  odd.data = static_cast<char*>(odd.data) + 2;
  expect_refused([&] { call.set(slots::Matmul::kA, odd); }, "no multiple of its 4 bytes");
  expect_refused([&] { call.set(slots::Matmul::kA, operand("a", {1, 1, 1, 1, 1})); },
                 "has 5 dimensions, and at most 4 are possible here");
}

class Outputs : public ::testing::Test {
 protected:
  Outputs() {
    call.begin(OpKind::kLayerNorm, slots::Norm::kCount, kCuda0);
    call.set(slots::Norm::kX, x);
    for (const auto& [name, slot] :
         {std::pair{"out", slots::Norm::kY}, {"sum", slots::Norm::kSum}}) {
      OutputSpec spec;
      spec.name = name;
      spec.slot = slot;
      spec.dtype = kF32;
      spec.rank = 2;
      spec.shape = {4, 6};
      call.add_output(spec, 1, true);
    }
  }
  void expect(const Operand& given, const std::string& said, std::size_t which = 0) {
    expect_refused([&] { call.set_output(call.outputs()[which], given); }, said);
  }
  Operand x = operand("x", {4, 6});
  OpCall call;
};

TEST_F(Outputs, MustBeAsTheyWillBe) {
  call.set_output(call.outputs()[0], operand("out", {4, 6}));
  call.set_output(call.outputs()[0], with_strides(operand("out", {4, 6}), {9, 1}));
  expect(operand("out", {6, 4}),
         "'out' [6, 4] float32 on cuda:0 has the wrong shape: the result is [4, 6]");
  expect(operand("out", {24}), "has the wrong shape");
  expect(operand("out", {4, 6}, kF16), "has the wrong dtype: the result is float32");
  expect(operand("out", {4, 6}, kF32, kCuda1),
         "is on another device than the inputs, which are on cuda:0");
  expect(operand("out", {4, 6}, kF32, kCpu), "'out' [4, 6] float32 on cpu is on another device");
  expect(with_strides(operand("out", {4, 6}), {0, 1}), "has elements that share memory");
  expect(with_strides(operand("out", {4, 6}), {5, 1}), "has elements that share memory");
  Operand readonly = operand("out", {4, 6});
  readonly.readonly = true;
  expect(readonly, "is read-only");
}

TEST_F(Outputs, OfNormsMayBeTheVeryPlaceOfAnInput) {
  call.set_output(call.outputs()[0], x);
  Operand shifted = x;
  shifted.data = static_cast<char*>(x.data) + 24;
  expect(shifted, "shares memory with 'x', which would be overwritten while it is read");
  expect(with_strides(x, {12, 1}), "shares memory with 'x'");
}

TEST_F(Outputs, HaveMemoryOfTheirOwn) {
  const Operand out = operand("out", {4, 6});
  call.set_output(call.outputs()[0], out);
  call.set_output(call.outputs()[0], out);  // it does not stand in its own way
  Operand sum = out;
  sum.name = "sum";
  expect(sum, "'sum' [4, 6] float32 on cuda:0 shares memory with the result 'out'", 1);
}

TEST_F(Outputs, AreEmptyTogether) {
  EXPECT_FALSE(call.empty());
  OpCall none;
  none.begin(OpKind::kMatmul, slots::Matmul::kCount, kCuda0);
  OutputSpec spec;
  spec.rank = 2;
  spec.shape = {0, 6};
  none.add_output(spec, 1);
  EXPECT_TRUE(none.empty());
}

// Against looking at every byte.
TEST(MemoryOverlap, IsWhatBytesSay) {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int met = 0;
  for (int round = 0; round < 20'000; ++round) {
    TensorDesc tensors[2];
    std::set<std::int64_t> bytes[2];
    std::int64_t start[2] = {1 << 20, (1 << 20) + draw(-60, 60)};
    for (int which = 0; which < 2; ++which) {
      TensorDesc& tensor = tensors[which];
      tensor.dtype = DType{2, static_cast<std::uint8_t>(8 << draw(0, 2)), 1};
      tensor.rank = static_cast<std::uint8_t>(draw(0, 3));
      for (std::size_t i = 0; i < tensor.rank; ++i) {
        tensor.shape[i] = draw(0, 20) == 0 ? 0 : draw(1, 4);
        tensor.strides[i] = draw(-9, 9);
      }
      std::vector<std::int64_t> places{0};
      for (std::size_t i = 0; i < tensor.rank; ++i) {
        std::vector<std::int64_t> next;
        for (const std::int64_t place : places) {
          for (std::int64_t at = 0; at < tensor.shape[i]; ++at) {
            next.push_back(place + at * tensor.strides[i]);
          }
        }
        places = next;
      }
      const auto size = static_cast<std::int64_t>(tensor.dtype.itemsize());
      for (const std::int64_t place : places) {
        for (std::int64_t byte = 0; byte < size; ++byte) {
          bytes[which].insert(start[which] + place * size + byte);
        }
      }
    }
    const bool expected = std::any_of(bytes[0].begin(), bytes[0].end(),
                                      [&](std::int64_t byte) { return bytes[1].count(byte) != 0; });
    met += expected ? 1 : 0;
    const auto at = [&](int which) { return address(static_cast<std::uintptr_t>(start[which])); };
    ASSERT_EQ(shares_memory(tensors[0], at(0), tensors[1], at(1)), expected)
        << dims(tensors[0]) << " and " << dims(tensors[1]) << " at " << start[1] - start[0];
    ASSERT_EQ(shares_memory(tensors[1], at(1), tensors[0], at(0)), expected);
  }
  EXPECT_GT(met, 2000);
  EXPECT_LT(met, 18'000);
}

TEST(MemoryOverlap, LargeArraysCostNothing) {
  TensorDesc large;
  large.dtype = kF32;
  large.rank = 4;
  large.shape = {1 << 10, 1 << 10, 1 << 10, 1 << 10};
  large.strides = {std::int64_t{1} << 31, 1 << 20, 1 << 10, 1};
  TensorDesc turned = large;
  std::swap(turned.strides[0], turned.strides[3]);
  const auto far = std::uintptr_t{1} << 44U;
  EXPECT_TRUE(shares_memory(large, address(256), turned, address(256)));
  EXPECT_FALSE(shares_memory(large, address(256), turned, address(256 + far)));
  // Every other slab of 2^30 elements, and those between.
  EXPECT_FALSE(
      shares_memory(large, address(256), large, address(256 + (std::uintptr_t{1} << 32U))));
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cmath>

#include "cpu_kernels.h"
#include "xpuruntime/matmul_op.h"

namespace xpuruntime::testing {
namespace {

double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }

TEST(CpuMatmul, OrderAndIds) {
  const auto ids = [](OpKind op) {
    std::vector<std::string> out;
    for (const auto& kernel : cpu_registry().kernels(op)) {
      out.emplace_back(kernel->id());
      EXPECT_TRUE(kernel->backend().available().ok) << kernel->backend().available().reason;
      EXPECT_FALSE(kernel->backend().version().empty());
    }
    return out;
  };
  using Ids = std::vector<std::string>;
  EXPECT_EQ(ids(OpKind::kMatmul), (Ids{"cpu.blas", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kConv), (Ids{"cpu.gemm_conv", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kConvInputGradient), (Ids{"cpu.gemm_conv", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kConvWeightGradient), (Ids{"cpu.gemm_conv", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kLayerNorm), (Ids{"cpu.vectorised", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kRmsNormBackward), (Ids{"cpu.vectorised", "cpu.reference"}));
  EXPECT_EQ(ids(OpKind::kAttentionBackward), (Ids{"cpu.reference"}));
}

struct Product {
  std::int64_t batch, m, n, k;
  bool a_turned, b_turned, out_turned;
};

void check_matmul(const std::string& id, DType dtype, const Product& at, Activation activation,
                  bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(at.m * 131 + at.n * 7 + at.k));
  const auto order = [](bool turned) {
    return turned ? std::vector<std::size_t>{0, 2, 1} : std::vector<std::size_t>{0, 1, 2};
  };
  Array a(dtype, {at.batch, at.m, at.k}, order(at.a_turned), 0, 3);
  Array b(dtype, {at.batch, at.k, at.n}, order(at.b_turned), 0, 1);
  Array out(dtype, {at.batch, at.m, at.n}, order(at.out_turned), 0, 2);
  Array bias(dtype, {at.n});
  a.fill(random);
  b.fill(random);
  bias.fill(random);
  MatmulOptions choices;
  choices.activation = activation;
  OpCall call = make_matmul({.a = a.operand("a"),
                             .b = b.operand("b"),
                             .bias = with_bias ? bias.operand("bias") : Operand{},
                             .scale_a = {},
                             .scale_b = {}},
                            choices);
  set_outputs(call, {&out});
  run_kernel(cpu_registry(), id, call);
  ASSERT_TRUE(out.guards_hold());
  for (std::int64_t g = 0; g < at.batch; ++g) {
    for (std::int64_t i = 0; i < at.m; ++i) {
      for (std::int64_t j = 0; j < at.n; ++j) {
        double want = with_bias ? bias.get(j) : 0.0;
        double size = std::abs(want);
        for (std::int64_t p = 0; p < at.k; ++p) {
          const double term = a.at({g, i, p}) * b.at({g, p, j});
          want += term;
          size += std::abs(term);
        }
        if (activation == Activation::kGelu) want = gelu(want);
        if (activation == Activation::kRelu) want = std::max(want, 0.0);
        if (activation == Activation::kSilu) want = want / (1 + std::exp(-want));
        if (activation == Activation::kGeluTanh) {
          want = 0.5 * want *
                 (1 + std::tanh(std::sqrt(2 / M_PI) * (want + 0.044715 * want * want * want)));
        }
        ASSERT_NEAR(out.at({g, i, j}), want, 4 * epsilon(dtype) * (size + 1e-3))
            << id << " " << to_string(dtype) << " " << g << " " << i << " " << j;
      }
    }
  }
}

const std::vector<Product> kProducts = {
    {1, 1, 1, 1, false, false, false},    {1, 3, 5, 7, false, false, false},
    {1, 33, 17, 65, true, false, false},  {1, 17, 33, 9, false, true, false},
    {1, 16, 48, 31, true, true, true},    {3, 9, 1, 5, false, false, true},
    {3, 1, 9, 5, true, true, false},      {2, 40, 50, 3, false, false, false},
    {2, 5, 6, 0, false, false, false},    {0, 5, 6, 4, false, false, false},
    {1, 0, 6, 4, false, false, false},    {1, 6, 0, 4, false, false, false},
    {1, 150, 130, 20, false, true, true},
};

TEST(CpuMatmul, MatmulReference) {
  for (const DType dtype : {kFp64, kFp32, kFp16, kBf16}) {
    for (const Product& at : kProducts) {
      check_matmul("cpu.reference", dtype, at, Activation::kNone, true);
    }
  }
}

TEST(CpuMatmul, MatmulBlas) {
  for (const DType dtype : {kFp64, kFp32}) {
    for (const Product& at : kProducts) {
      check_matmul("cpu.blas", dtype, at, Activation::kNone, false);
      check_matmul("cpu.blas", dtype, at, Activation::kNone, true);
    }
  }
}

TEST(CpuMatmul, MatmulActivations) {
  for (const Activation activation :
       {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    for (const char* id : {"cpu.reference", "cpu.blas"}) {
      check_matmul(id, kFp32, {1, 20, 37, 11, false, false, false}, activation, true);
      check_matmul(id, kFp32, {1, 20, 37, 11, false, false, true}, activation, false);
      check_matmul(id, kFp64, {1, 20, 37, 11, false, false, false}, activation, true);
    }
  }
}

TEST(CpuMatmul, MatmulFp8WithScales) {
  std::mt19937 random(3);
  Array a(kE4m3, {5, 6});
  Array b(kE4m3, {6, 4});
  Array scale_a(kFp32, {1});
  Array scale_b(kFp32, {1});
  Array out(kBf16, {5, 4});
  a.fill(random);
  b.fill(random);
  scale_a.fill(0.5);
  scale_b.fill(4.0);
  OpCall call = make_matmul({.a = a.operand("a"),
                             .b = b.operand("b"),
                             .bias = {},
                             .scale_a = scale_a.operand("scale_a"),
                             .scale_b = scale_b.operand("scale_b")},
                            {});
  set_outputs(call, {&out});
  run_kernel(cpu_registry(), "cpu.reference", call);
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t j = 0; j < 4; ++j) {
      double want = 0;
      for (std::int64_t p = 0; p < 6; ++p) want += 2 * a.at({i, p}) * b.at({p, j});
      EXPECT_NEAR(out.at({i, j}), want, 0x1p-8 * std::abs(want));
    }
  }
  EXPECT_THROW(run_kernel(cpu_registry(), "cpu.blas", call), UnsupportedOperationError);
}

TEST(CpuMatmul, BlasRefusesWhatItCannotReadInPlace) {
  std::mt19937 random(3);
  Array a(kFp32, {8, 6}, {0, 1}, 1);
  Array b(kFp32, {6, 4});
  Array out(kFp32, {8, 4});
  a.fill(random);
  b.fill(random);
  OpCall call = make_matmul(
      {.a = a.operand("a"), .b = b.operand("b"), .bias = {}, .scale_a = {}, .scale_b = {}}, {});
  set_outputs(call, {&out});
  try {
    run_kernel(cpu_registry(), "cpu.blas", call);
    FAIL();
  } catch (const UnsupportedOperationError& error) {
    EXPECT_NE(std::string(error.what()).find("'a'"), std::string::npos) << error.what();
  }
  run_kernel(cpu_registry(), "cpu.reference", call);
}

TEST(CpuMatmul, ConfigIsRefused) {
  Array a(kFp32, {2, 2});
  OpCall call = make_matmul(
      {.a = a.operand("a"), .b = a.operand("b"), .bias = {}, .scale_a = {}, .scale_b = {}}, {});
  for (const char* id : {"cpu.blas", "cpu.reference"}) {
    EXPECT_THROW(
        (void)find_kernel(cpu_registry(), OpKind::kMatmul, id)->prepare(call.desc, {}, "x"),
        InputError);
  }
}

TEST(CpuMatmul, SameBitsEveryTime) {
  std::mt19937 random(1);
  Array a(kFp32, {300, 200});
  Array b(kFp32, {200, 260});
  a.fill(random);
  b.fill(random);
  std::vector<unsigned char> first;
  for (int round = 0; round < 5; ++round) {
    Array out(kFp32, {300, 260});
    OpCall call = make_matmul(
        {.a = a.operand("a"), .b = b.operand("b"), .bias = {}, .scale_a = {}, .scale_b = {}}, {});
    set_outputs(call, {&out});
    run_kernel(cpu_registry(), "cpu.blas", call);
    if (round == 0) first = out.bytes();
    EXPECT_EQ(out.bytes(), first);
  }
}

}  // namespace
}  // namespace xpuruntime::testing

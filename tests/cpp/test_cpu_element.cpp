// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/dropout.h"
#include "cpu/element.h"
#include "cpu/simd.h"

namespace xpuruntime::cpu {
namespace {

// Every number of the format, from its fields.
template <int kExponent, int kMantissa>
double by_fields(std::uint32_t bits) {
  const std::uint32_t exponent = (bits >> kMantissa) & ((1U << kExponent) - 1);
  const double fraction = (bits & ((1U << kMantissa) - 1)) / std::exp2(kMantissa);
  constexpr int bias = (1 << (kExponent - 1)) - 1;
  const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                     : std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
  return (bits >> (kExponent + kMantissa)) != 0U ? -value : value;
}

template <typename Format, int kExponent, int kMantissa>
void check_format() {
  constexpr std::uint32_t count = 1U << (1 + kExponent + kMantissa);
  std::vector<double> finite;
  for (std::uint32_t bits = 0; bits < count; ++bits) {
    const double value = Format::decode(bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Format::decode(Format::encode(value))));
      continue;
    }
    EXPECT_EQ(Format::encode(value), bits) << value;
    if (std::isinf(value)) continue;
    EXPECT_EQ(value, (by_fields<kExponent, kMantissa>(bits))) << bits;
    finite.push_back(value);
  }
  std::sort(finite.begin(), finite.end());
  std::mt19937_64 random(5);
  const double largest = finite.back();
  for (int round = 0; round < 20000; ++round) {
    const double x = std::ldexp(std::uniform_real_distribution<double>(-1, 1)(random),
                                static_cast<int>(random() % 60) - 40);
    if (std::abs(x) >= largest) continue;
    const double got = Format::decode(Format::encode(x));
    const auto above = std::lower_bound(finite.begin(), finite.end(), x);
    const double high = *above;
    const double low = above == finite.begin() ? high : *(above - 1);
    EXPECT_LE(std::abs(got - x), std::min(std::abs(high - x), std::abs(low - x))) << x;
  }
  // Ties go to the even neighbour.
  for (std::size_t i = 1; i < finite.size(); ++i) {
    const double middle = (finite[i - 1] + finite[i]) / 2;
    if (middle == finite[i - 1] || middle == finite[i]) continue;
    EXPECT_EQ(Format::encode(middle) & 1U, 0U) << middle;
  }
}

TEST(CpuElement, Fp16) { check_format<Fp16, 5, 10>(); }
TEST(CpuElement, Bf16) { check_format<Bf16, 8, 7>(); }
TEST(CpuElement, E4m3) { check_format<E4m3, 4, 3>(); }
TEST(CpuElement, E5m2) { check_format<E5m2, 5, 2>(); }

TEST(CpuElement, Overflow) {
  EXPECT_EQ(Fp16::encode(65519.0), 0x7BFFU);
  EXPECT_EQ(Fp16::encode(65520.0), 0x7C00U);
  EXPECT_EQ(Bf16::encode(-1e300), 0xFF80U);
  EXPECT_EQ(E4m3::encode(448.0), 0x7EU);
  EXPECT_EQ(E4m3::encode(1000.0), 0x7FU);
  EXPECT_TRUE(std::isnan(E4m3::decode(0xFF)));
}

// The conversions of vectors, for every 16-bit number and at every rounding boundary.
template <typename T, typename Format, std::size_t N>
void check_lanes() {
  using V = Simd<static_cast<int>(N)>;
  typename V::Floats lanes;
  T numbers[N];
  float wide[N];
  for (std::uint32_t first = 0; first < 65536; first += N) {
    for (std::uint32_t i = 0; i < N; ++i) numbers[i].bits = static_cast<std::uint16_t>(first + i);
    V::load(lanes, numbers);
    V::store(wide, lanes);
    for (std::uint32_t i = 0; i < N; ++i) {
      const double want = Format::decode(first + i);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(wide[i])) << first + i;
      } else {
        ASSERT_EQ(static_cast<double>(wide[i]), want) << first + i;
      }
    }
    for (const std::uint32_t change :
         {0U, 1U, 0xFFFFFFFFU, 0x1000U, 0x0FFFU, 0x1001U, 0x8000U, 0x7FFFU, 0x8001U}) {
      float in[N];
      for (std::uint32_t i = 0; i < N; ++i) {
        in[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(wide[i]) + change);
      }
      V::load(lanes, in);
      V::store(numbers, lanes);
      for (std::uint32_t i = 0; i < N; ++i) {
        const std::uint32_t want = Format::encode(static_cast<double>(in[i]));
        if (std::isnan(in[i])) {
          ASSERT_TRUE(std::isnan(Format::decode(numbers[i].bits))) << in[i];
        } else {
          ASSERT_EQ(numbers[i].bits, want) << in[i];
        }
      }
    }
  }
}

TEST(CpuElement, VectorsConvertAsNumbersDo) {
  check_lanes<Half, Fp16, 4>();
  check_lanes<Half, Fp16, 8>();
  check_lanes<Brain, Bf16, 4>();
  check_lanes<Brain, Bf16, 8>();
}

TEST(CpuElement, VectorFunctions) {
  using V = Simd<4>;
  for (double x = -110; x < 100; x += 0.00731) {
    float lanes[4] = {static_cast<float>(x), static_cast<float>(x / 10),
                      static_cast<float>(x / 100), static_cast<float>(std::abs(x) / 10)};
    V::Floats v;
    V::load(v, lanes);
    V::exp(v);
    float got[4];
    V::store(got, v);
    for (int i = 0; i < 4; ++i) {
      const auto in = static_cast<double>(lanes[i]);
      const double want = std::exp(in);
      if (in > 88.3) {
        EXPECT_TRUE(std::isinf(got[i]) || in < 88.4) << in;
      } else if (in < -87.3) {
        EXPECT_LE(got[i], 2e-38F) << in;
      } else {
        EXPECT_NEAR(static_cast<double>(got[i]) / want, 1.0, 2.5e-7) << in;
      }
    }
    V::load(v, lanes);
    v = v < 0.0F ? V::Floats(-v) : v;
    V::erfc(v);
    V::store(got, v);
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(static_cast<double>(got[i]), std::erfc(std::abs(static_cast<double>(lanes[i]))),
                  5e-7);
    }
  }
  float special[4] = {std::numeric_limits<float>::quiet_NaN(),
                      std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity(), 0.0F};
  V::Floats v;
  V::load(v, special);
  V::exp(v);
  V::store(special, v);
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_TRUE(std::isinf(special[1]));
  EXPECT_EQ(special[2], 0.0F);
  EXPECT_EQ(special[3], 1.0F);
}

// Known answers of Philox4x32-10 (of the generator's own test vectors): counter and key all zero.
TEST(CpuElement, DropoutIsPhilox) {
  constexpr std::uint32_t words[4] = {0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U};
  const auto kept = [&](std::size_t word, float p) {
    return static_cast<double>(words[word]) >= static_cast<double>(p) * 4294967296.0;
  };
  for (const float p : {0.1F, 0.45F, 0.5F, 0.65F, 0.8F, 0.9F}) {
    const Dropout dropout(p, 0, 0);
    const double factor = 1.0 / (1.0 - static_cast<double>(p));
    EXPECT_EQ(dropout.factor(0, 0, 0), kept(0, p) ? factor : 0.0);
    EXPECT_EQ(dropout.factor(0, 0, 1), kept(1, p) ? factor : 0.0);
    EXPECT_EQ(dropout.factor(0, 8, 0), kept(2, p) ? factor : 0.0);
    EXPECT_EQ(dropout.factor(0, 8, 1), kept(3, p) ? factor : 0.0);
  }
  EXPECT_EQ(Dropout().factor(3, 4, 5), 1.0);
  int dropped = 0;
  const Dropout dropout(0.25F, 1234567890123, 42);
  for (int row = 0; row < 100; ++row) {
    for (int column = 0; column < 100; ++column)
      dropped += dropout.factor(7, row, column) == 0.0 ? 1 : 0;
  }
  EXPECT_NEAR(dropped, 2500, 200);
}

}  // namespace
}  // namespace xpuruntime::cpu

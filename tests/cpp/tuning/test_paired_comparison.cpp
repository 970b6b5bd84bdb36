// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "xpuruntime/error.h"
#include "xpuruntime/paired_comparison.h"

namespace xpuruntime {
namespace {

using Times = std::vector<double>;

// Times around `mean` with noise of a share.
Times around(double mean, std::size_t rounds, double noise, std::mt19937& random) {
  std::normal_distribution<double> normal;
  Times times(rounds);
  for (double& one : times) one = mean * std::exp(noise * normal(random));
  return times;
}

struct PairedComparisonTest : ::testing::Test {
  PairedComparison compare(double ratio, std::size_t rounds, double noise, Margin margin = {}) {
    return compare_paired(around(100 * ratio, rounds, noise, random),
                          around(100, rounds, noise, random), around(100, rounds, noise, random),
                          margin, {});
  }
  std::mt19937 random{7};  // NOLINT(bugprone-random-generator-seed): the same times every time
};

TEST_F(PairedComparisonTest, TellsWhichOfTwoIsFaster) {
  EXPECT_EQ(compare(0.8, 11, 0.005).verdict, Verdict::kFaster);
  EXPECT_EQ(compare(1.2, 11, 0.005).verdict, Verdict::kSlower);
  EXPECT_EQ(compare(1.0, 31, 0.002).verdict, Verdict::kTied);
  EXPECT_TRUE(compare(1.2, 11, 0.005).not_faster);
  EXPECT_FALSE(compare(0.8, 11, 0.005).not_faster);
  const PairedComparison found = compare(0.8, 21, 0.005);
  EXPECT_NEAR(found.ratio, 0.8, 0.01);
  EXPECT_LE(found.low, found.ratio);
  EXPECT_GE(found.high, found.ratio);
  EXPECT_EQ(found.rounds, 21U);
}

TEST_F(PairedComparisonTest, FewRoundsDecideNothing) {
  EXPECT_EQ(compare(0.5, 6, 0.001).verdict, Verdict::kInconclusive) << "2^-6 is above 1 %";
  EXPECT_EQ(compare(0.5, 7, 0.001).verdict, Verdict::kFaster);
  const Times slow(7, 100.0);
  const Times fast(7, 50.0);
  EXPECT_EQ(compare_paired(fast, slow, slow, {}, {0.99, 2, 1}).verdict, Verdict::kInconclusive);
  EXPECT_EQ(compare_paired(fast, slow, slow, {}, {0.99, 1, 2}).verdict, Verdict::kInconclusive);
}

TEST_F(PairedComparisonTest, TheMarginIsAShareAndAtLeastATime) {
  EXPECT_DOUBLE_EQ((Margin{0.02, 0}.of(10)), 0.02);
  EXPECT_DOUBLE_EQ((Margin{0.02, 5}.of(10)), 0.5);
  EXPECT_DOUBLE_EQ((Margin{0.02, 5}.of(1000)), 0.02);
  EXPECT_NE(compare(0.8, 21, 0.005, {0.02, 25}).verdict, Verdict::kFaster)
      << "it gains 20 us of 25";
  EXPECT_EQ(compare(0.7, 21, 0.005, {0.02, 25}).verdict, Verdict::kFaster);
}

TEST_F(PairedComparisonTest, NoiseOfTheControlWidensTheMargin) {
  const Times control(11, 100.0);
  const Times twin(11, 110.0);
  const Times fast(11, 92.0);
  const PairedComparison found = compare_paired(fast, control, twin, {}, {});
  EXPECT_NEAR(found.margin, 0.21, 0.001);
  EXPECT_EQ(found.verdict, Verdict::kInconclusive);
  EXPECT_FALSE(found.not_faster) << "noise never proves that nothing is gained";
  EXPECT_EQ(compare_paired(Times(11, 50.0), control, twin, {}, {}).verdict, Verdict::kFaster);
}

TEST_F(PairedComparisonTest, EqualKernelsAreRarelyToldApart) {
  int wrong = 0;
  for (int i = 0; i < 2000; ++i) {
    wrong += compare(1.0, 15, 0.05, {0, 0}).verdict == Verdict::kFaster ? 1 : 0;
  }
  EXPECT_LE(wrong, 20) << "1 % of 2000";
}

TEST(LookRounds, BeginWhereUnanimousRoundsDecide) {
  const std::vector<std::size_t> looks = look_rounds(7, 61, 0.99, 1);
  EXPECT_EQ(looks.back(), 61U);
  EXPECT_LE(std::exp2(-static_cast<double>(looks.front())) * static_cast<double>(looks.size() + 1),
            0.01);
  EXPECT_GT(look_rounds(7, 61, 0.99, 16).front(), looks.front());
}

TEST(PairedComparisonErrors, AreSaid) {
  const Times two{1, 2};
  EXPECT_THROW((void)compare_paired({}, {}, {}, {}, {}), InputError);
  EXPECT_THROW((void)compare_paired(two, Times{1}, Times{1}, {}, {}), InputError);
  EXPECT_THROW((void)compare_paired(two, Times{1, 0}, two, {}, {}), InputError);
}

}  // namespace
}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dispatch/call_table.h"

namespace xpuruntime {
namespace {

using Words = std::vector<std::uint64_t>;

TEST(CallTable, AnEmptyOneHasNothing) {
  const CallTable table;
  EXPECT_FALSE(table.has(Words{1, 2}));
  EXPECT_EQ(table.size(), 0U);
}

TEST(CallTable, HasWhatWasKeptAndNothingElse) {
  CallTable table;
  table.keep(Words{1, 2, 3});
  EXPECT_TRUE(table.has(Words{1, 2, 3}));
  EXPECT_FALSE(table.has(Words{1, 2}));
  EXPECT_FALSE(table.has(Words{1, 2, 4}));
  EXPECT_FALSE(table.has(Words{1, 2, 3, 0}));
  EXPECT_FALSE(table.has(Words{3, 2, 1}));
}

TEST(CallTable, KeepingAgainChangesNothing) {
  CallTable table;
  table.keep(Words{7});
  table.keep(Words{7});
  EXPECT_EQ(table.size(), 1U);
}

TEST(CallTable, AWordIsKeptWithAKeyAndStaysWhileItGrows) {
  CallTable table;
  for (std::uint64_t i = 0; i < 500; ++i) table.keep(Words{i, i}, 10 * i);
  table.keep(Words{7, 7}, 1);
  for (std::uint64_t i = 0; i < 500; ++i) {
    const std::uint64_t* const found = table.find(Words{i, i});
    ASSERT_NE(found, nullptr) << i;
    EXPECT_EQ(*found, 10 * i);
  }
  EXPECT_EQ(table.find(Words{7, 8}), nullptr);
  table.clear();
  EXPECT_EQ(table.find(Words{7, 7}), nullptr);
}

TEST(CallTable, ManyKeysOfManyLengthsStayApartWhileItGrows) {
  CallTable table;
  for (std::uint64_t i = 0; i < 3000; ++i) table.keep(Words(1 + i % 9, i));
  EXPECT_EQ(table.size(), 3000U);
  for (std::uint64_t i = 0; i < 3000; ++i) {
    EXPECT_TRUE(table.has(Words(1 + i % 9, i))) << i;
    EXPECT_FALSE(table.has(Words(1 + (i + 1) % 9, i))) << i;
  }
  EXPECT_FALSE(table.has(Words{3000}));
}

TEST(CallTable, ForgetsAllWhereAskedToAndTakesNewOnes) {
  CallTable table;
  for (std::uint64_t i = 0; i < 100; ++i) table.keep(Words{i});
  table.clear();
  EXPECT_EQ(table.size(), 0U);
  EXPECT_FALSE(table.has(Words{5}));
  table.keep(Words{5});
  EXPECT_TRUE(table.has(Words{5}));
  EXPECT_FALSE(table.has(Words{6}));
}

TEST(CallTable, ForgetsAllWithOneMoreThanItsMost) {
  CallTable table;
  for (std::uint64_t i = 0; i < CallTable::kMost; ++i) table.keep(Words{i});
  EXPECT_EQ(table.size(), CallTable::kMost);
  table.keep(Words{CallTable::kMost});
  EXPECT_EQ(table.size(), 1U);
  EXPECT_FALSE(table.has(Words{0}));
  EXPECT_TRUE(table.has(Words{CallTable::kMost}));
}

}  // namespace
}  // namespace xpuruntime

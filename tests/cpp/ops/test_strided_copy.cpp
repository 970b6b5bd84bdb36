// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/strided_copy.h"

namespace xpuruntime {
namespace {

constexpr DeviceId kCpu{};

struct Case {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::size_t lowest = 0;   // elements below (0, ..., 0)
  std::size_t highest = 0;  // elements above
};

// Element by element, by the definition.
std::vector<unsigned char> expected(const unsigned char* origin, const Case& one,
                                    std::size_t itemsize) {
  std::vector<unsigned char> out;
  std::vector<std::int64_t> index(one.shape.size(), 0);
  for (;;) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < index.size(); ++d) offset += index[d] * one.strides[d];
    const unsigned char* item = origin + offset * static_cast<std::int64_t>(itemsize);
    out.insert(out.end(), item, item + itemsize);
    std::size_t d = index.size();
    while (d > 0 && ++index[d - 1] == one.shape[d - 1]) index[--d] = 0;
    if (d == 0) return out;
  }
}

void compare(Case one, std::size_t itemsize) {
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t d = 0; d < one.shape.size(); ++d) {
    const std::int64_t reach = (one.shape[d] - 1) * one.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  std::vector<std::uint64_t> storage(static_cast<std::size_t>(high - low + 1) * itemsize / 8 + 2);
  auto* const bytes = reinterpret_cast<unsigned char*>(storage.data());
  for (std::size_t i = 0; i < storage.size() * 8; ++i)
    bytes[i] = static_cast<unsigned char>(i * 7 + i / 251);
  const unsigned char* const origin = bytes + static_cast<std::size_t>(-low) * itemsize;
  const std::vector<unsigned char> want = expected(origin, one, itemsize);
  std::vector<std::uint64_t> got(want.size() / 8 + 1);
  copy_to_contiguous(kCpu, origin, got.data(), one.shape, one.strides, itemsize);
  ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size()), 0);
}

TEST(StridedCopy, EveryItemSizeAndLayout) {
  const std::vector<Case> cases = {
      {{}, {}},
      {{5}, {1}},
      {{5}, {3}},
      {{5}, {-2}},
      {{4, 6}, {1, 4}},
      {{4, 6}, {12, 2}},
      {{3, 4, 5}, {20, 5, 1}},
      {{3, 4, 5}, {1, 3, 12}},
      {{3, 1, 5}, {5, 99, 1}},
      {{2, 3}, {0, 1}},
      {{2, 2, 2, 2, 2, 2, 2, 2}, {1, 2, 4, 8, 16, 32, 64, 128}},
  };
  for (const std::size_t itemsize : {1U, 2U, 4U, 8U, 16U}) {
    for (const Case& one : cases) compare(one, itemsize);
  }
}

TEST(StridedCopy, RandomPermutationsAndSteps) {
  std::mt19937 random(17);
  for (int round = 0; round < 300; ++round) {
    const std::size_t rank = 1 + random() % 5;
    Case one{std::vector<std::int64_t>(rank), std::vector<std::int64_t>(rank)};
    std::vector<std::size_t> order(rank);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::int64_t stride = 1;
    for (const std::size_t d : order) {
      one.shape[d] = 1 + static_cast<std::int64_t>(random() % 5);
      const std::int64_t step = 1 + static_cast<std::int64_t>(random() % 2);
      one.strides[d] = (random() % 3 == 0 ? -1 : 1) * stride * step;
      stride *= one.shape[d] * step;
    }
    compare(one, std::size_t{1} << (random() % 5));
  }
}

TEST(StridedCopy, EmptyArraysTouchNothing) {
  const std::vector<std::int64_t> shape{3, 0, 2};
  const std::vector<std::int64_t> strides{1, 1, 1};
  EXPECT_NO_THROW(copy_to_contiguous(kCpu, nullptr, nullptr, shape, strides, 4));
}

TEST(StridedCopy, RefusesWrongArguments) {
  std::uint64_t source[4] = {};
  std::uint64_t target[4] = {};
  const auto copy = [&](std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                        std::size_t itemsize, std::size_t shift = 0) {
    copy_to_contiguous(kCpu, reinterpret_cast<char*>(source) + shift, target, shape, strides,
                       itemsize);
  };
  EXPECT_THROW(copy({2}, {1, 1}, 4), InputError);
  EXPECT_THROW(copy({-1}, {1}, 4), InputError);
  EXPECT_THROW(copy({2}, {1}, 3), InputError);
  EXPECT_THROW(copy({2}, {1}, 4, 2), InputError);
  EXPECT_THROW(copy(std::vector<std::int64_t>(9, 1), std::vector<std::int64_t>(9, 1), 4),
               InputError);
  const std::vector<std::int64_t> one{1};
  EXPECT_THROW(copy_to_contiguous(kCpu, nullptr, target, one, one, 4), InputError);
}

}  // namespace
}  // namespace xpuruntime

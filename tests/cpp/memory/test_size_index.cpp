// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "memory/size_index.h"

namespace xpuruntime {
namespace {

struct Node {
  std::size_t size = 0;
  Node* left = nullptr;
  Node* right = nullptr;
};

TEST(SizeIndex, EmptyFindsNothing) {
  const SizeIndex<Node> index;
  EXPECT_EQ(index.find(512), nullptr);
  EXPECT_EQ(index.any(), nullptr);
}

TEST(SizeIndex, FindsWhateverFits) {
  std::mt19937_64 random(1);
  SizeIndex<Node> index;
  std::vector<std::unique_ptr<Node>> inside;
  for (int step = 0; step < 20000; ++step) {
    const std::size_t units = std::size_t{1} + random() % (std::size_t{1} << (random() % 24));
    if (random() % 2 == 0 || inside.empty()) {
      inside.push_back(std::make_unique<Node>());
      inside.back()->size = units * 512;
      index.insert(inside.back().get());
    } else {
      std::swap(inside[random() % inside.size()], inside.back());
      index.remove(inside.back().get());
      inside.pop_back();
    }
    const std::size_t wanted = units * 512;
    const Node* found = index.find(wanted);
    std::size_t best = SIZE_MAX;
    for (const auto& node : inside) {
      if (node->size >= wanted) best = std::min(best, node->size);
    }
    if (best == SIZE_MAX) {
      ASSERT_EQ(found, nullptr);
    } else {
      ASSERT_NE(found, nullptr);
      ASSERT_EQ(found->size, best);
    }
    ASSERT_EQ(index.any() == nullptr, inside.empty());
  }
}

TEST(SizeIndex, TakesTheLargestSizes) {
  SizeIndex<Node> index;
  Node node{(SIZE_MAX / 2) / 512 * 512};
  index.insert(&node);
  EXPECT_EQ(index.find(512), &node);
  EXPECT_EQ(index.find(node.size), &node);
  index.remove(&node);
  EXPECT_EQ(index.any(), nullptr);
}

}  // namespace
}  // namespace xpuruntime

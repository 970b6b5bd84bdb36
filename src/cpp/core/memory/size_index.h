// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace xpuruntime {

/// Free blocks by size: doubly linked lists for classes of 16 steps a power of two, and bitmaps
/// that find the next class in use. Allocates nothing, so nothing here throws. `Node` has `size`,
/// `left` and `right`; sizes are in bytes and multiples of kUnit. Owns no node, and is not
/// thread-safe: the caller holds its lock.
template <typename Node>
class SizeIndex {
 public:
  static constexpr std::size_t kUnit = 512;

  void insert(Node* node) noexcept {
    const Class at = class_of(node->size);
    Node*& head = heads_[at.row][at.column];
    node->left = nullptr;
    node->right = head;
    if (head != nullptr) head->left = node;
    head = node;
    columns_[at.row] |= 1U << at.column;
    rows_ |= std::uint64_t{1} << at.row;
  }

  void remove(Node* node) noexcept {
    const Class at = class_of(node->size);
    Node*& head = heads_[at.row][at.column];
    (node->left != nullptr ? node->left->right : head) = node->right;
    if (node->right != nullptr) node->right->left = node->left;
    node->left = node->right = nullptr;
    if (head != nullptr) return;
    columns_[at.row] &= ~(1U << at.column);
    if (columns_[at.row] == 0) rows_ &= ~(std::uint64_t{1} << at.row);
  }

  /// The smallest that fits, within the resolution of a class; nullptr when none does. It stays in
  /// the index.
  Node* find(std::size_t size) const noexcept {
    const Class at = class_of(size);
    if (Node* fit = smallest(heads_[at.row][at.column], size)) return fit;
    const std::uint32_t columns = columns_[at.row] & above(at.column);
    if (columns != 0) return smallest(heads_[at.row][lowest(columns)], size);
    const std::uint64_t rows = at.row >= 63 ? 0 : rows_ & ~((std::uint64_t{2} << at.row) - 1);
    if (rows == 0) return nullptr;
    const auto row = static_cast<std::size_t>(std::countr_zero(rows));
    return smallest(heads_[row][lowest(columns_[row])], size);
  }

  /// Any block; nullptr when empty.
  Node* any() const noexcept {
    if (rows_ == 0) return nullptr;
    const auto row = static_cast<std::size_t>(std::countr_zero(rows_));
    return heads_[row][lowest(columns_[row])];
  }

 private:
  static constexpr std::size_t kColumns = 16;
  static constexpr std::size_t kRows = 56;

  struct Class {
    std::size_t row;
    std::size_t column;
  };

  static Class class_of(std::size_t size) noexcept {
    const std::size_t units = size / kUnit;
    if (units < kColumns) return {0, units};
    const auto log = static_cast<std::size_t>(std::bit_width(units)) - 1;
    return {log - 3, (units >> (log - 4)) - kColumns};
  }

  static std::uint32_t above(std::size_t column) noexcept {
    return ~((std::uint32_t{2} << column) - 1);
  }
  static std::size_t lowest(std::uint32_t bits) noexcept {
    return static_cast<std::size_t>(std::countr_zero(bits));
  }

  static Node* smallest(Node* head, std::size_t size) noexcept {
    Node* best = nullptr;
    for (Node* node = head; node != nullptr; node = node->right) {
      if (node->size == size) return node;
      if (node->size > size && (best == nullptr || node->size < best->size)) best = node;
    }
    return best;
  }

  std::uint64_t rows_ = 0;
  std::array<std::uint32_t, kRows> columns_{};
  std::array<std::array<Node*, kColumns>, kRows> heads_{};
};

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace xpuruntime {

/// Shape and strides, both in elements. Up to six dimensions live inside the object.
class Layout {
 public:
  /// No dimensions: one element.
  Layout() noexcept = default;
  /// The last dimension is the fastest. Throws InputError for a negative length or more elements
  /// than fit in 63 bits.
  explicit Layout(std::span<const std::int64_t> shape);
  /// Strides may be 0 or negative. Throws as above, and when the two have different lengths.
  Layout(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);

  std::size_t rank() const noexcept { return rank_; }
  std::span<const std::int64_t> shape() const noexcept { return {values(), rank_}; }
  std::span<const std::int64_t> strides() const noexcept { return {values() + rank_, rank_}; }
  std::int64_t elements() const noexcept { return elements_; }
  /// Whether the elements lie one after another, the last dimension fastest. Dimensions of one
  /// element have no order.
  bool is_contiguous() const noexcept;

 private:
  static constexpr std::size_t kInlineRank = 6;
  std::int64_t* prepare(std::span<const std::int64_t> shape);
  const std::int64_t* values() const noexcept {
    return rank_ <= kInlineRank ? small_.data() : large_.data();
  }

  std::size_t rank_ = 0;
  std::int64_t elements_ = 1;
  std::array<std::int64_t, 2 * kInlineRank> small_{};
  std::vector<std::int64_t> large_;
};

}  // namespace xpuruntime

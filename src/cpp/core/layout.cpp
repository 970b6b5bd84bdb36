// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/layout.h"

#include <algorithm>
#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {

std::int64_t* Layout::prepare(std::span<const std::int64_t> shape) {
  bool empty = false;
  for (const std::int64_t length : shape) {
    if (length < 0) {
      throw InputError("dimension " + std::to_string(length) +
                       " of a shape is negative: lengths are 0 or more");
    }
    empty = empty || length == 0;
  }
  elements_ = empty ? 0 : 1;
  for (const std::int64_t length : shape) {
    if (!empty && __builtin_mul_overflow(elements_, length, &elements_)) {
      throw InputError("a shape has more elements than can be counted: check its dimensions");
    }
  }
  rank_ = shape.size();
  if (rank_ > kInlineRank) large_.resize(2 * rank_);
  std::int64_t* const to = rank_ <= kInlineRank ? small_.data() : large_.data();
  std::copy(shape.begin(), shape.end(), to);
  return to + rank_;
}

Layout::Layout(std::span<const std::int64_t> shape) {
  std::int64_t* const strides = prepare(shape);
  std::int64_t step = 1;
  for (std::size_t i = rank_; i-- > 0;) {
    strides[i] = step;
    // An empty shape may have lengths whose product means nothing.
    if (elements_ != 0) step *= shape[i];
  }
}

Layout::Layout(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (shape.size() != strides.size()) {
    throw InputError("a shape of " + std::to_string(shape.size()) + " dimensions has " +
                     std::to_string(strides.size()) + " strides: give one for each dimension");
  }
  std::copy(strides.begin(), strides.end(), prepare(shape));
}

bool Layout::is_contiguous() const noexcept {
  if (elements_ <= 1) return true;
  const std::int64_t* const shape = values();
  const std::int64_t* const strides = shape + rank_;
  std::int64_t step = 1;
  for (std::size_t i = rank_; i-- > 0;) {
    if (shape[i] == 1) continue;
    if (strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

}  // namespace xpuruntime

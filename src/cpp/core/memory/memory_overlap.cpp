// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "memory/memory_overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace xpuruntime {
namespace {

// What a multiple of `step` bytes the distance of two elements may have, one in each view.
struct Span {
  std::int64_t step = 0;
  std::int64_t low = 0;
  std::int64_t high = 0;
};

// All dimensions of both views, those of equal steps together, the largest step first.
struct Spans {
  std::array<Span, 2 * TensorDesc::kMaxRank + 1> all{};
  std::size_t count = 0;

  void add(std::int64_t step, std::int64_t low, std::int64_t high) noexcept {
    if (step < 0) {
      step = -step;
      std::swap(low, high);
      low = -low;
      high = -high;
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (all[i].step != step) continue;
      all[i].low += low;
      all[i].high += high;
      return;
    }
    std::size_t at = count++;
    for (; at > 0 && all[at - 1].step < step; --at) all[at] = all[at - 1];
    all[at] = {step, low, high};
  }
};

constexpr int kMaxSteps = 4096;

std::int64_t floor_div(std::int64_t value, std::int64_t by) noexcept {
  return value / by - (value % by < 0 ? 1 : 0);
}

// Whether the spans from `first` on can add up to `distance`.
bool reaches(const Spans& spans, std::size_t first, std::int64_t distance, int& steps) noexcept {
  if (++steps > kMaxSteps) return true;
  if (first == spans.count) return distance == 0;
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t i = first + 1; i < spans.count; ++i) {
    low += spans.all[i].step * spans.all[i].low;
    high += spans.all[i].step * spans.all[i].high;
  }
  const Span& span = spans.all[first];
  const std::int64_t from = std::max(span.low, -floor_div(high - distance, span.step));
  const std::int64_t to = std::min(span.high, floor_div(distance - low, span.step));
  for (std::int64_t i = from; i <= to; ++i) {
    if (reaches(spans, first + 1, distance - i * span.step, steps)) return true;
    if (steps > kMaxSteps) return true;
  }
  return false;
}

bool add_dims(const TensorDesc& tensor, std::int64_t sign, Spans& spans) noexcept {
  const auto size = static_cast<std::int64_t>(tensor.dtype.itemsize());
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return false;
    const std::int64_t last = tensor.shape[i] - 1;
    if (last == 0 || tensor.strides[i] == 0) continue;
    spans.add(sign * tensor.strides[i] * size, 0, last);
  }
  spans.add(sign, 0, size - 1);
  return true;
}

// The bytes between the first and the last of a view; none where it has no element.
struct Bytes {
  std::int64_t first = 0;
  std::int64_t end = 0;
};

Bytes bytes_of(const TensorDesc& tensor, const void* data) noexcept {
  std::int64_t low = 0;
  std::int64_t high = 1;
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 0) return {};
    const std::int64_t reach = (tensor.shape[i] - 1) * tensor.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto size = static_cast<std::int64_t>(tensor.dtype.itemsize());
  const auto start = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(data));
  return {start + low * size, start + high * size};
}

}  // namespace

bool shares_memory(const TensorDesc& left, const void* left_data, const TensorDesc& right,
                   const void* right_data) noexcept {
  // Nearly always they lie apart.
  const Bytes one = bytes_of(left, left_data);
  const Bytes other = bytes_of(right, right_data);
  if (one.first >= other.end || other.first >= one.end) return false;
  Spans spans;
  if (!add_dims(left, 1, spans) || !add_dims(right, -1, spans)) return false;
  const std::int64_t distance = static_cast<std::int64_t>(
      reinterpret_cast<std::intptr_t>(right_data) - reinterpret_cast<std::intptr_t>(left_data));
  int steps = 0;
  return reaches(spans, 0, distance, steps);
}

}  // namespace xpuruntime

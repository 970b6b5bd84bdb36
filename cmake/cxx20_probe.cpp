// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// What the sources need of C++20 and old compilers lack: GCC 10 has no std::bit_cast and no
// std::to_chars of floats, and Clang 15 wants `typename` where C++20 does not.
#include <array>
#include <bit>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <span>

struct Point {
  int x = 0;
  int y = 0;
  friend bool operator==(const Point&, const Point&) = default;
};

template <typename T>
struct Holder {
  using Value = T::Value;
};

struct Number {
  using Value = int;
};

template <std::integral T>
T sum(std::span<const T> values) {
  T total{};
  for (const T value : values) total += value;
  return total;
}

int main() {
  const std::array<Holder<Number>::Value, 3> values{1, 2, 3};
  const Point point{.x = 1, .y = 2};
  std::array<char, 32> text{};
  const auto written = std::to_chars(text.data(), text.data() + text.size(), 0.5);
  const bool right = sum(std::span<const int>(values)) == 6 && point == Point{1, 2} &&
                     std::bit_ceil(5U) == 8U && std::bit_cast<std::uint32_t>(1.0F) != 0 &&
                     written.ptr != text.data();
  return right ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "xpuruntime/dtype.h"

namespace xpuruntime::cpu {

/// The element types that kernels of the backend `cpu` read and write.
enum class Element : std::uint8_t { kFp64, kFp32, kFp16, kBf16, kE4m3, kE5m2, kBool, kInt64 };

/// Empty for other types.
std::optional<Element> element_of(DType dtype) noexcept;

/// A binary format with `kExponent` and `kMantissa` bits after the sign. `kInfinity`: with IEEE's
/// infinities and NaNs; else all ones is the only NaN (e4m3fn).
template <int kExponent, int kMantissa, bool kInfinity = true>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr std::uint64_t kTop = (1U << kExponent) - 1;
  static constexpr std::uint64_t kFraction = (1U << kMantissa) - 1;

  /// Exact.
  static double decode(std::uint32_t bits) noexcept {
    const std::uint64_t sign = std::uint64_t{bits >> (kExponent + kMantissa)} << 63U;
    const std::uint64_t exponent = (bits >> kMantissa) & kTop;
    const std::uint64_t fraction = bits & kFraction;
    constexpr std::uint64_t shift = 52 - kMantissa;
    if (exponent == 0) {
      const double magnitude = std::ldexp(static_cast<double>(fraction), 1 - kBias - kMantissa);
      return std::bit_cast<double>(std::bit_cast<std::uint64_t>(magnitude) | sign);
    }
    if (kInfinity ? exponent == kTop : (exponent == kTop && fraction == kFraction)) {
      return std::bit_cast<double>(sign | (std::uint64_t{0x7FF} << 52U) | (fraction << shift));
    }
    return std::bit_cast<double>(sign | ((exponent + 1023 - kBias) << 52U) | (fraction << shift));
  }

  /// Rounded once, to nearest, ties to even. Too large: infinity, or NaN where there is none.
  static std::uint32_t encode(double value) noexcept {
    constexpr std::uint64_t shift = 52 - kMantissa;
    constexpr std::uint64_t infinity = kTop << kMantissa;
    constexpr std::uint64_t last = kInfinity ? infinity - 1 : infinity + kFraction - 1;
    constexpr std::uint64_t over = kInfinity ? infinity : infinity + kFraction;
    constexpr std::uint64_t nan = kInfinity ? infinity | (1U << (kMantissa - 1)) : over;
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const auto sign = static_cast<std::uint32_t>(bits >> 63U) << (kExponent + kMantissa);
    const std::uint64_t magnitude = bits & ~(std::uint64_t{1} << 63U);
    std::uint64_t out = 0;
    if (value != value) {
      out = nan;
    } else if (magnitude < (std::uint64_t{1024 - kBias} << 52U)) {
      const double units = std::ldexp(std::bit_cast<double>(magnitude), kBias + kMantissa - 1);
      out = static_cast<std::uint64_t>(std::nearbyint(units));
    } else {
      const std::uint64_t half = (std::uint64_t{1} << (shift - 1)) - 1;
      out = ((magnitude + half + ((magnitude >> shift) & 1U)) >> shift) -
            (std::uint64_t{1023 - kBias} << kMantissa);
      if (out > last) out = over;
    }
    return sign | static_cast<std::uint32_t>(out);
  }
};

using Fp16 = SmallFloat<5, 10>;
using Bf16 = SmallFloat<8, 7>;
using E4m3 = SmallFloat<4, 3, false>;
using E5m2 = SmallFloat<5, 2>;

namespace detail {
template <typename T>
T load_as(const std::byte* base, std::int64_t index) noexcept {
  T value;
  std::memcpy(&value, base + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void store_as(std::byte* base, std::int64_t index, T value) noexcept {
  std::memcpy(base + index * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}
}  // namespace detail

/// Element `index` of an array, exactly (an int64 beyond 2^53 is rounded).
inline double load(Element element, const std::byte* base, std::int64_t index) noexcept {
  switch (element) {
    case Element::kFp64:
      return detail::load_as<double>(base, index);
    case Element::kFp32:
      return static_cast<double>(detail::load_as<float>(base, index));
    case Element::kFp16:
      return Fp16::decode(detail::load_as<std::uint16_t>(base, index));
    case Element::kBf16:
      return Bf16::decode(detail::load_as<std::uint16_t>(base, index));
    case Element::kE4m3:
      return E4m3::decode(detail::load_as<std::uint8_t>(base, index));
    case Element::kE5m2:
      return E5m2::decode(detail::load_as<std::uint8_t>(base, index));
    case Element::kBool:
      return detail::load_as<std::uint8_t>(base, index) != 0 ? 1.0 : 0.0;
    case Element::kInt64:
      return static_cast<double>(detail::load_as<std::int64_t>(base, index));
  }
  return 0;
}

/// Rounds once, to nearest, ties to even. Floating-point types only.
inline void store(Element element, std::byte* base, std::int64_t index, double value) noexcept {
  switch (element) {
    case Element::kFp64:
      return detail::store_as(base, index, value);
    case Element::kFp32:
      return detail::store_as(base, index, static_cast<float>(value));
    case Element::kFp16:
      return detail::store_as(base, index, static_cast<std::uint16_t>(Fp16::encode(value)));
    case Element::kBf16:
      return detail::store_as(base, index, static_cast<std::uint16_t>(Bf16::encode(value)));
    case Element::kE4m3:
      return detail::store_as(base, index, static_cast<std::uint8_t>(E4m3::encode(value)));
    case Element::kE5m2:
      return detail::store_as(base, index, static_cast<std::uint8_t>(E5m2::encode(value)));
    case Element::kBool:
    case Element::kInt64:
      return;
  }
}

}  // namespace xpuruntime::cpu

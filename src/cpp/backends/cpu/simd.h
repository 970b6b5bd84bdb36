// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Arithmetic on N fp32 numbers at a time, N a power of two, in the compiler's own vector types.
//
// Everything here is inlined into functions that are compiled once for each instruction set (see
// vector_code.cpp), so nothing may be called through a pointer or a lambda, and vectors are passed
// by reference.

#define XPURUNTIME_INLINE inline __attribute__((always_inline))

namespace xpuruntime::cpu {

/// fp16 and bf16 in memory.
struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

/// The vector types of N lanes: fp32, unsigned 32-bit and unsigned 16-bit.
template <int N>
struct Lanes;
template <>
struct Lanes<4> {
  using Floats __attribute__((vector_size(16))) = float;
  using Words __attribute__((vector_size(16))) = std::uint32_t;
  using Halves __attribute__((vector_size(8))) = std::uint16_t;
};
template <>
struct Lanes<8> {
  using Floats __attribute__((vector_size(32))) = float;
  using Words __attribute__((vector_size(32))) = std::uint32_t;
  using Halves __attribute__((vector_size(16))) = std::uint16_t;
};
template <>
struct Lanes<16> {
  using Floats __attribute__((vector_size(64))) = float;
  using Words __attribute__((vector_size(64))) = std::uint32_t;
  using Halves __attribute__((vector_size(32))) = std::uint16_t;
};

template <int N>
struct Simd {
  using Floats = Lanes<N>::Floats;
  using Words = Lanes<N>::Words;
  using Halves = Lanes<N>::Halves;
  static constexpr std::size_t kLanes = N;

  static XPURUNTIME_INLINE void fill(Floats& out, float value) { out = Floats{} + value; }

  static XPURUNTIME_INLINE void load(Floats& out, const float* from) {
    std::memcpy(&out, from, sizeof(out));
  }
  static XPURUNTIME_INLINE void store(float* to, const Floats& in) {
    std::memcpy(to, &in, sizeof(in));
  }

  static XPURUNTIME_INLINE void load(Floats& out, const Brain* from) {
    Halves raw;
    std::memcpy(&raw, from, sizeof(raw));
    const Words wide = __builtin_convertvector(raw, Words) << 16U;
    out = reinterpret_cast<Floats>(wide);
  }
  static XPURUNTIME_INLINE void store(Brain* to, const Floats& in) {
    const Words bits = reinterpret_cast<Words>(in);
    const Words rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
    const Words wide = (bits & 0x7FFFFFFFU) > 0x7F800000U ? Words((bits >> 16U) | 0x40U) : rounded;
    const Halves raw = __builtin_convertvector(wide, Halves);
    std::memcpy(to, &raw, sizeof(raw));
  }

  static XPURUNTIME_INLINE void load(Floats& out, const Half* from) {
    Halves raw;
    std::memcpy(&raw, from, sizeof(raw));
    const Words bits = __builtin_convertvector(raw, Words);
    const Words magnitude = (bits & 0x7FFFU) << 13U;
    // As fp32 the exponent is 112 too small; a multiplication sets subnormal numbers right too.
    Floats value = reinterpret_cast<Floats>(magnitude);
    value = value * 0x1p112F;
    Words words = reinterpret_cast<Words>(value);
    words = magnitude >= 0x0F800000U ? Words(magnitude | 0x7F800000U) : words;
    words |= (bits & 0x8000U) << 16U;
    out = reinterpret_cast<Floats>(words);
  }
  static XPURUNTIME_INLINE void store(Half* to, const Floats& in) {
    const Words bits = reinterpret_cast<Words>(in);
    const Words magnitude = bits & 0x7FFFFFFFU;
    const Words normal = (magnitude + 0xFFFU + ((magnitude >> 13U) & 1U) - (112U << 23U)) >> 13U;
    // The sum with 0.5 is rounded to multiples of 2^-24, the smallest fp16.
    Floats small = reinterpret_cast<Floats>(magnitude);
    small = small + 0.5F;
    const Words subnormal = reinterpret_cast<Words>(small) - 0x3F000000U;
    Words wide = magnitude < 0x38800000U ? subnormal : normal;
    wide = magnitude >= 0x477FF000U ? Words(Words{} + 0x7C00U) : wide;
    wide = magnitude > 0x7F800000U ? Words(Words{} + 0x7E00U) : wide;
    wide |= (bits >> 16U) & 0x8000U;
    const Halves raw = __builtin_convertvector(wide, Halves);
    std::memcpy(to, &raw, sizeof(raw));
  }

  /// The first `count` < N elements; the other lanes are zero.
  template <typename T>
  static XPURUNTIME_INLINE void load_part(Floats& out, const T* from, std::int64_t count) {
    T part[kLanes] = {};
    std::memcpy(part, from, static_cast<std::size_t>(count) * sizeof(T));
    load(out, part);
  }
  template <typename T>
  static XPURUNTIME_INLINE void store_part(T* to, const Floats& in, std::int64_t count) {
    T part[kLanes];
    store(part, in);
    std::memcpy(to, part, static_cast<std::size_t>(count) * sizeof(T));
  }

  /// By halves, so that the result depends on N alone.
  static XPURUNTIME_INLINE float sum(const Floats& in) {
    float lanes[kLanes];
    store(lanes, in);
    for (int width = N / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }

  /// e^x within 2 units in the last place. Below -87.3 it is 0, above 88.3 infinity.
  static XPURUNTIME_INLINE void exp(Floats& x) {
    // x = n ln 2 + r with n whole: adding 1.5 * 2^23 rounds to it.
    Floats inner = x > 88.3F ? Floats(Floats{} + 88.3F) : x;
    inner = inner < -87.3F ? Floats(Floats{} - 87.3F) : inner;
    const Floats shifted = inner * 1.44269504F + 12582912.0F;
    const Floats n = shifted - 12582912.0F;
    const Floats r = inner - n * 0.693359375F + n * 2.12194440e-4F;
    Floats p = r * kExp[4] + kExp[3];
    p = p * r + kExp[2];
    p = p * r + kExp[1];
    p = p * r + kExp[0];
    p = p * r * r + r + 1.0F;
    Words power = reinterpret_cast<Words>(shifted);
    power = (power + 127U) << 23U;
    p = p * reinterpret_cast<Floats>(power);
    p = x > 88.3F ? Floats(Floats{} + __builtin_inff()) : p;
    x = x < -87.3F ? Floats{} : p;
  }

  /// 1 - erf(x) for x >= 0, within 4e-7.
  static XPURUNTIME_INLINE void erfc(Floats& x) {
    const Floats t = 1.0F / (1.0F + 0.5F * x);
    Floats p = Floats{} + kErfc[9];
    for (int i = 8; i >= 0; --i) p = p * t + kErfc[i];
    p = p - x * x;
    exp(p);
    x = t * p;
  }

 private:
  // (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2.
  static constexpr float kExp[5] = {0.5F, 0.16666576266288757F, 0.04166646674275398F,
                                    0.008363179862499237F, 0.0013933650916442275F};
  // log(erfc(x) / t) + x^2 as a polynomial of t = 1 / (1 + x / 2).
  static constexpr float kErfc[10] = {
      -1.265468716621399F,   0.9990603923797607F,   0.38292455673217773F, 0.05253269895911217F,
      -0.05186151713132858F, 0.020350493490695953F, -0.8185365796089172F, 1.2489850521087646F,
      -0.7201575636863708F,  0.1521712839603424F};
};

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cpu/simd.h"
#include "cpu/vector_code.h"

namespace xpuruntime::cpu {

template <int N>
XPURUNTIME_INLINE void activate_lanes(Activation activation, typename Simd<N>::Floats& x) {
  using V = Simd<N>;
  using Floats = V::Floats;
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      x = x < 0.0F ? Floats{} : x;
      return;
    case Activation::kGelu: {
      // x / 2 * (1 + erf(x / sqrt 2)), without cancellation on either side.
      Floats tail = x < 0.0F ? Floats(-x) : x;
      tail = tail * 0.70710678118654752440F;
      V::erfc(tail);
      x = 0.5F * x * (x < 0.0F ? tail : Floats(2.0F - tail));
      return;
    }
    case Activation::kGeluTanh: {
      // 1 + tanh(u) = 2 / (1 + e^(-2u))
      Floats power = -1.59576912160573071176F * (x + 0.044715F * x * x * x);
      V::exp(power);
      x = x / (1.0F + power);
      return;
    }
    case Activation::kSilu: {
      Floats power = -x;
      V::exp(power);
      x = x / (1.0F + power);
      return;
    }
  }
}

/// See VectorCode::finish.
template <int N>
XPURUNTIME_INLINE void finish_rows(const FinishRows& at) {
  using V = Simd<N>;
  using Floats = V::Floats;
  const std::int64_t whole = at.columns / N * N;
  const std::int64_t part = at.columns - whole;
  for (std::int64_t row = 0; row < at.rows; ++row) {
    float* const data = at.data + row * at.stride;
    const float shift = at.row_bias == nullptr ? 0.0F : at.row_bias[row];
    Floats v;
    Floats w = {};
    for (std::int64_t j = 0; j < at.columns; j += N) {
      if (j < whole) {
        V::load(v, data + j);
        if (at.column_bias != nullptr) V::load(w, at.column_bias + j);
      } else {
        V::load_part(v, data + j, part);
        if (at.column_bias != nullptr) V::load_part(w, at.column_bias + j, part);
      }
      v = v + (w + shift);
      activate_lanes<N>(at.activation, v);
      if (j < whole) {
        V::store(data + j, v);
      } else {
        V::store_part(data + j, v, part);
      }
    }
  }
}

}  // namespace xpuruntime::cpu

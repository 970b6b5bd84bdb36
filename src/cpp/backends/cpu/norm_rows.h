// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cpu/simd.h"
#include "cpu/vector_code.h"

namespace xpuruntime::cpu {

/// See VectorCode::Norm. Each row is read once; the rest happens in `s`, which stays in the cache.
/// The variance is that of the differences from a first mean, corrected by their own mean, so that
/// rows far from zero lose nothing.
template <int N, typename T>
XPURUNTIME_INLINE void norm_rows(const NormRows& at, std::int64_t first, std::int64_t last,
                                 float* s) {
  using V = Simd<N>;
  using Floats = V::Floats;
  const std::int64_t columns = at.columns;
  const std::int64_t whole = columns / N * N;
  const std::int64_t part = columns - whole;
  const auto count = static_cast<float>(columns);
  for (std::int64_t row = first; row < last; ++row) {
    const T* const x = static_cast<const T*>(at.x) + row * at.x_stride;
    const T* const residual = at.residual == nullptr
                                  ? nullptr
                                  : static_cast<const T*>(at.residual) + row * at.residual_stride;
    T* const sum = at.sum == nullptr ? nullptr : static_cast<T*>(at.sum) + row * at.sum_stride;
    T* const y = static_cast<T*>(at.y) + row * at.y_stride;

    Floats totals[4] = {};
    Floats v;
    Floats w;
    for (std::int64_t j = 0; j < whole; j += N) {
      V::load(v, x + j);
      if (residual != nullptr) {
        V::load(w, residual + j);
        v += w;
      }
      if (sum != nullptr) V::store(sum + j, v);
      V::store(s + j, v);
      totals[(j / N) & 3] += v;
    }
    if (part > 0) {
      V::load_part(v, x + whole, part);
      if (residual != nullptr) {
        V::load_part(w, residual + whole, part);
        v += w;
      }
      if (sum != nullptr) V::store_part(sum + whole, v, part);
      V::store(s + whole, v);
      totals[0] += v;
    }
    const Floats total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
    const float middle = at.centred ? V::sum(total) / count : 0.0F;
    for (std::int64_t j = columns; j < whole + (part > 0 ? N : 0); ++j) s[j] = middle;

    Floats squares[4] = {};
    Floats rests[4] = {};
    for (std::int64_t j = 0; j < columns; j += N) {
      V::load(v, s + j);
      v -= middle;
      V::store(s + j, v);
      squares[(j / N) & 3] += v * v;
      rests[(j / N) & 3] += v;
    }
    const Floats square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    const Floats rest = (rests[0] + rests[1]) + (rests[2] + rests[3]);
    const float off = at.centred ? V::sum(rest) / count : 0.0F;
    const float variance = V::sum(square) / count - off * off;
    const float rstd =
        1.0F / std::sqrt((variance > 0.0F ? variance : variance * 0.0F) + at.epsilon);

    Floats b;
    for (std::int64_t j = 0; j < whole; j += N) {
      V::load(v, s + j);
      V::load(w, at.weight + j);
      V::load(b, at.bias + j);
      v = (v - off) * rstd * w + b;
      V::store(y + j, v);
    }
    if (part > 0) {
      V::load(v, s + whole);
      V::load(w, at.weight + whole);
      V::load(b, at.bias + whole);
      v = (v - off) * rstd * w + b;
      V::store_part(y + whole, v, part);
    }
    if (at.mean != nullptr) at.mean[row * at.mean_stride] = middle + off;
    if (at.rstd != nullptr) at.rstd[row * at.rstd_stride] = rstd;
  }
}

/// See VectorCode::NormBackward.
template <int N, typename T>
XPURUNTIME_INLINE void norm_backward_rows(const NormBackwardRows& at, std::int64_t first,
                                          std::int64_t last, float* scratch, float* sums) {
  using V = Simd<N>;
  using Floats = V::Floats;
  const std::int64_t columns = at.columns;
  const std::int64_t whole = columns / N * N;
  const std::int64_t part = columns - whole;
  const std::int64_t length = padded(columns);
  float* const g = scratch;
  float* const normal = scratch + length;
  std::memset(sums, 0, static_cast<std::size_t>(2 * length) * sizeof(float));
  for (std::int64_t row = first; row < last; ++row) {
    const T* const grad_y = static_cast<const T*>(at.grad_y) + row * at.grad_y_stride;
    const T* const x = static_cast<const T*>(at.x) + row * at.x_stride;
    const T* const more = at.grad_sum == nullptr
                              ? nullptr
                              : static_cast<const T*>(at.grad_sum) + row * at.grad_sum_stride;
    T* const grad_x = static_cast<T*>(at.grad_x) + row * at.grad_x_stride;
    const float mean = at.mean == nullptr ? 0.0F : at.mean[row * at.mean_stride];
    const float rstd = at.rstd[row * at.rstd_stride];

    Floats sum_g[2] = {};
    Floats sum_gx[2] = {};
    Floats v;
    Floats w;
    Floats one;
    for (std::int64_t j = 0; j < columns; j += N) {
      if (j < whole) {
        V::load(v, grad_y + j);
        V::load(w, x + j);
      } else {
        V::load_part(v, grad_y + j, part);
        V::load_part(w, x + j, part);
      }
      w = (w - mean) * rstd;
      V::load(one, sums + j);
      one += v * w;
      V::store(sums + j, one);
      V::load(one, sums + length + j);
      one += v;
      V::store(sums + length + j, one);
      V::load(one, at.weight + j);
      v *= one;
      V::store(g + j, v);
      V::store(normal + j, w);
      sum_g[(j / N) & 1] += v;
      sum_gx[(j / N) & 1] += v * w;
    }
    const auto count = static_cast<float>(columns);
    const Floats all_g = sum_g[0] + sum_g[1];
    const Floats all_gx = sum_gx[0] + sum_gx[1];
    const float mean_g = at.centred ? V::sum(all_g) / count : 0.0F;
    const float mean_gx = V::sum(all_gx) / count;
    for (std::int64_t j = 0; j < columns; j += N) {
      V::load(v, g + j);
      V::load(w, normal + j);
      v = (v - mean_g - w * mean_gx) * rstd;
      if (j < whole) {
        if (more != nullptr) {
          V::load(w, more + j);
          v += w;
        }
        V::store(grad_x + j, v);
      } else {
        if (more != nullptr) {
          V::load_part(w, more + j, part);
          v += w;
        }
        V::store_part(grad_x + j, v, part);
      }
    }
  }
}

}  // namespace xpuruntime::cpu

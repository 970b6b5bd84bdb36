// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cpu/simd.h"
#include "cpu/vector_code.h"

namespace xpuruntime::cpu {

/// Columns whose sums are kept in fp32; those of longer rows are added up in fp64.
constexpr std::int64_t kSummed = 4096;

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
  const auto count = static_cast<double>(columns);
  for (std::int64_t row = first; row < last; ++row) {
    const T* const x = static_cast<const T*>(at.x) + row * at.x_stride;
    const T* const residual = at.residual == nullptr
                                  ? nullptr
                                  : static_cast<const T*>(at.residual) + row * at.residual_stride;
    T* const sum = at.sum == nullptr ? nullptr : static_cast<T*>(at.sum) + row * at.sum_stride;
    T* const y = static_cast<T*>(at.y) + row * at.y_stride;

    Floats v;
    Floats w;
    double total = 0.0;
    for (std::int64_t start = 0; start < whole; start += kSummed) {
      const std::int64_t end = start + kSummed < whole ? start + kSummed : whole;
      Floats totals[4] = {};
      for (std::int64_t j = start; j < end; j += N) {
        V::load(v, x + j);
        if (residual != nullptr) {
          V::load(w, residual + j);
          v += w;
        }
        if (sum != nullptr) V::store(sum + j, v);
        V::store(s + j, v);
        totals[(j / N) & 3] += v;
      }
      total += V::sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    }
    if (part > 0) {
      V::load_part(v, x + whole, part);
      if (residual != nullptr) {
        V::load_part(w, residual + whole, part);
        v += w;
      }
      if (sum != nullptr) V::store_part(sum + whole, v, part);
      V::store(s + whole, v);
      total += V::sum(v);
    }
    const float middle = at.centred ? static_cast<float>(total / count) : 0.0F;
    for (std::int64_t j = columns; j < whole + (part > 0 ? N : 0); ++j) s[j] = middle;

    double square = 0.0;
    double rest = 0.0;
    for (std::int64_t start = 0; start < columns; start += kSummed) {
      const std::int64_t end = start + kSummed < columns ? start + kSummed : columns;
      Floats squares[4] = {};
      Floats rests[4] = {};
      for (std::int64_t j = start; j < end; j += N) {
        V::load(v, s + j);
        v -= middle;
        V::store(s + j, v);
        squares[(j / N) & 3] += v * v;
        rests[(j / N) & 3] += v;
      }
      square += V::sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
      rest += V::sum((rests[0] + rests[1]) + (rests[2] + rests[3]));
    }
    const float off = at.centred ? static_cast<float>(rest / count) : 0.0F;
    const float variance = static_cast<float>(square / count) - off * off;
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

    Floats v;
    Floats w;
    Floats one;
    double all_g = 0.0;
    double all_gx = 0.0;
    for (std::int64_t start = 0; start < columns; start += kSummed) {
      const std::int64_t end = start + kSummed < columns ? start + kSummed : columns;
      Floats sum_g[2] = {};
      Floats sum_gx[2] = {};
      for (std::int64_t j = start; j < end; j += N) {
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
      all_g += V::sum(sum_g[0] + sum_g[1]);
      all_gx += V::sum(sum_gx[0] + sum_gx[1]);
    }
    const auto count = static_cast<double>(columns);
    const float mean_g = at.centred ? static_cast<float>(all_g / count) : 0.0F;
    const float mean_gx = static_cast<float>(all_gx / count);
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

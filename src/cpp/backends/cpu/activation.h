// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cmath>

#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

/// By definition, in the precision of T. A NaN stays one.
template <typename T>
T activate(Activation activation, T x) noexcept {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < T{0} ? T{0} : x;
    case Activation::kGelu:
      return T(0.5) * x * (T{1} + std::erf(x * T(0.70710678118654752440)));
    case Activation::kGeluTanh: {
      const T inner = T(0.79788456080286535588) * (x + T(0.044715) * x * x * x);
      return T(0.5) * x * (T{1} + std::tanh(inner));
    }
    case Activation::kSilu:
      return x / (T{1} + std::exp(-x));
  }
  return x;
}

}  // namespace xpuruntime::cpu

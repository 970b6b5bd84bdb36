// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/element.h"

#include <dlpack/dlpack.h>

namespace xpuruntime::cpu {

std::optional<Element> element_of(DType dtype) noexcept {
  if (dtype == DType{kDLFloat, 64, 1}) return Element::kFp64;
  if (dtype == DType{kDLFloat, 32, 1}) return Element::kFp32;
  if (dtype == DType{kDLFloat, 16, 1}) return Element::kFp16;
  if (dtype == DType{kDLBfloat, 16, 1}) return Element::kBf16;
  if (dtype == DType{kDLFloat8_e4m3fn, 8, 1}) return Element::kE4m3;
  if (dtype == DType{kDLFloat8_e5m2, 8, 1}) return Element::kE5m2;
  if (dtype == DType{kDLBool, 8, 1}) return Element::kBool;
  if (dtype == DType{kDLInt, 64, 1}) return Element::kInt64;
  return std::nullopt;
}

}  // namespace xpuruntime::cpu

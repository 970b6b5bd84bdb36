// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/view.h"

namespace xpuruntime::cpu {

std::size_t View::element_size(Element element) noexcept {
  switch (element) {
    case Element::kFp64:
    case Element::kInt64:
      return 8;
    case Element::kFp32:
      return 4;
    case Element::kFp16:
    case Element::kBf16:
      return 2;
    case Element::kE4m3:
    case Element::kE5m2:
    case Element::kBool:
      return 1;
  }
  return 1;
}

View view(const OpDesc& op, std::size_t slot, void* const* operands) {
  View out;
  if (!op.has(slot)) return out;
  const TensorDesc& tensor = op[slot];
  out.present = true;
  out.data = static_cast<std::byte*>(operands == nullptr ? nullptr : operands[slot]);
  out.element = element_of(tensor.dtype).value_or(Element::kFp32);
  const std::size_t lead = TensorDesc::kMaxRank - tensor.rank;
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    out.shape[lead + i] = tensor.shape[i];
    out.strides[lead + i] = tensor.shape[i] == 1 ? 0 : tensor.strides[i];
  }
  return out;
}

std::int64_t elements(const TensorDesc& tensor) noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < tensor.rank; ++i) count *= tensor.shape[i];
  return count;
}

}  // namespace xpuruntime::cpu

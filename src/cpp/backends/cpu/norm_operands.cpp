// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/norm_operands.h"

#include <algorithm>
#include <string>

namespace xpuruntime::cpu {

Support check_norm_operands(const OpDesc& op, std::size_t x,
                            std::initializer_list<std::size_t> matrices) {
  const Element element = element_of(op[x].dtype).value_or(Element::kBool);
  if (element != Element::kFp32 && element != Element::kFp16 && element != Element::kBf16) {
    return Support::no("computes in fp32, and " + to_string(op[x].dtype) + " is no narrower type");
  }
  if (op[x].shape[1] == 0) return Support::no("needs at least one column");
  for (const std::size_t slot : matrices) {
    if (!op.has(slot) || elements(op[slot]) == 0 || op[slot].shape[1] == 1 ||
        op[slot].strides[1] == 1) {
      continue;
    }
    return Support::no("needs the columns of '" + std::string(slot_name(op.kind, slot)) +
                       "' next to each other, and they are " + std::to_string(op[slot].strides[1]) +
                       " elements apart");
  }
  return Support::yes();
}

std::size_t vector_index(Element element) noexcept {
  if (element == Element::kFp32) return 0;
  return element == Element::kFp16 ? 1 : 2;
}

void spread_columns(const View& columns, std::int64_t count, float missing, float* out) noexcept {
  std::fill(out, out + padded(count), missing);
  if (!columns) return;
  for (std::int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(columns.get(j));
}

}  // namespace xpuruntime::cpu

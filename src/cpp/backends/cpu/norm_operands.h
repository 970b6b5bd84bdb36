// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <initializer_list>

#include "cpu/vector_code.h"
#include "cpu/view.h"
#include "xpuruntime/kernel.h"

namespace xpuruntime::cpu {

/// Whether vectors can serve it: the dtype, and the columns of the `matrices` (slots) one behind
/// the other.
Support check_norm_operands(const OpDesc& op, std::size_t x,
                            std::initializer_list<std::size_t> matrices);

/// The place of a dtype in the arrays of VectorCode.
std::size_t vector_index(Element element) noexcept;

/// Writes the columns as fp32, or `missing` where the operand is absent, and `missing` up to the
/// next whole vector.
void spread_columns(const View& columns, std::int64_t count, float missing, float* out) noexcept;

/// Rows that are one task: enough that handing it out costs nothing.
constexpr std::int64_t rows_at_once(std::int64_t columns) noexcept {
  return columns >= 16384 ? 1 : 16384 / columns;
}

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "xpuruntime/op.h"

namespace xpuruntime {

/// Whether two views of memory have a byte in common. Also right for views that lie within each
/// other, such as the parts of a packed buffer. A no is always right; for views with very many
/// different strides a yes may be said to be safe.
bool shares_memory(const TensorDesc& left, const void* left_data, const TensorDesc& right,
                   const void* right_data) noexcept;

}  // namespace xpuruntime

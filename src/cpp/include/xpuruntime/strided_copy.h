// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "xpuruntime/types.h"

namespace xpuruntime {

/// Most dimensions of an array that `copy_to_contiguous` takes.
inline constexpr std::size_t kMaxCopyRank = 8;

/// Copies a strided array to a contiguous one (last dimension fastest), both on `device`.
///
/// `source` is the address of element (0, ..., 0). `strides` count elements, not bytes, and may be
/// 0 or negative. `itemsize` is 1, 2, 4, 8 or 16 bytes; both addresses are aligned to it, or for 16
/// to 8. The arrays must not overlap. A dimension of 0 copies nothing. On CUDA the copy is enqueued
/// on `stream` and the call returns; on the CPU it is done on return. Allocates nothing and never
/// synchronises. Errors: InputError (rank, itemsize, lengths that differ, a negative dimension,
/// alignment), CudaError.
void copy_to_contiguous(DeviceId device, const void* source, void* destination,
                        std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                        std::size_t itemsize, StreamHandle stream = 0);

}  // namespace xpuruntime

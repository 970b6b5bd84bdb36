// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "xpuruntime/op.h"

namespace xpuruntime::cudnn {

bool is_half(DType dtype) noexcept;    ///< float16 or bfloat16
bool is_single(DType dtype) noexcept;  ///< float32
bool has_elements(const TensorDesc& tensor) noexcept;
/// Whether every stride of a dimension with more than one element is positive.
bool has_positive_strides(const TensorDesc& tensor) noexcept;
/// Whether the elements lie in row-major order without gaps.
bool is_packed(const TensorDesc& tensor) noexcept;
/// Bytes that divide the address, a power of two up to 256.
std::int64_t alignment_of(const TensorDesc& tensor) noexcept;
/// Bytes from the first to the last element. For strides that are not negative.
std::size_t span_bytes(const TensorDesc& tensor) noexcept;
/// "the strides of 'k' are [..]": the start of a sentence.
std::string strides_of(const OpDesc& op, std::size_t slot);

}  // namespace xpuruntime::cudnn

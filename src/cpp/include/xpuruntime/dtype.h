// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace xpuruntime {

/// An element type, with the codes and the memory layout of DLPack's `DLDataType`. Only types of
/// whole bytes and one lane are made here; `is_known` says whether a foreign one is such a type.
struct DType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;

  /// In bytes.
  std::size_t itemsize() const noexcept { return bits / 8U; }
  friend bool operator==(const DType&, const DType&) = default;
};

bool is_known(DType dtype) noexcept;
/// "float32", "bfloat16", "float8_e4m3fn", "bool", ...; "dlpack(code=, bits=, lanes=)" for a type
/// that is not known.
std::string to_string(DType dtype);
/// Throws InputError, which lists the names.
DType parse_dtype(std::string_view name);

/// The `typestr` of NumPy's and CUDA's array interfaces, such as "<f4"; empty for types that have
/// none, such as bfloat16.
std::string to_typestr(DType dtype);
/// Throws UnsupportedOperationError for other byte orders, structures and text.
DType parse_typestr(std::string_view typestr);

}  // namespace xpuruntime

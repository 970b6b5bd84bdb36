// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/dtype.h"

#include <dlpack/dlpack.h>

#include <array>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

struct Known {
  std::string_view name;
  DType dtype;
  std::string_view typestr;  // Empty where NumPy has no such type.
};

constexpr std::array kKnown{
    Known{"float32", {kDLFloat, 32, 1}, "<f4"},
    Known{"float16", {kDLFloat, 16, 1}, "<f2"},
    Known{"bfloat16", {kDLBfloat, 16, 1}, ""},
    Known{"float64", {kDLFloat, 64, 1}, "<f8"},
    Known{"int64", {kDLInt, 64, 1}, "<i8"},
    Known{"int32", {kDLInt, 32, 1}, "<i4"},
    Known{"int16", {kDLInt, 16, 1}, "<i2"},
    Known{"int8", {kDLInt, 8, 1}, "|i1"},
    Known{"uint8", {kDLUInt, 8, 1}, "|u1"},
    Known{"uint16", {kDLUInt, 16, 1}, "<u2"},
    Known{"uint32", {kDLUInt, 32, 1}, "<u4"},
    Known{"uint64", {kDLUInt, 64, 1}, "<u8"},
    Known{"bool", {kDLBool, 8, 1}, "|b1"},
    Known{"complex64", {kDLComplex, 64, 1}, "<c8"},
    Known{"complex128", {kDLComplex, 128, 1}, "<c16"},
    Known{"complex32", {kDLComplex, 32, 1}, ""},
    Known{"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}, ""},
    Known{"float8_e5m2", {kDLFloat8_e5m2, 8, 1}, ""},
    Known{"float8_e4m3fnuz", {kDLFloat8_e4m3fnuz, 8, 1}, ""},
    Known{"float8_e5m2fnuz", {kDLFloat8_e5m2fnuz, 8, 1}, ""},
    Known{"float8_e4m3b11fnuz", {kDLFloat8_e4m3b11fnuz, 8, 1}, ""},
    Known{"float8_e4m3", {kDLFloat8_e4m3, 8, 1}, ""},
    Known{"float8_e3m4", {kDLFloat8_e3m4, 8, 1}, ""},
    Known{"float8_e8m0fnu", {kDLFloat8_e8m0fnu, 8, 1}, ""},
};

const Known* find(DType dtype) noexcept {
  for (const Known& known : kKnown) {
    if (known.dtype == dtype) return &known;
  }
  return nullptr;
}

}  // namespace

bool is_known(DType dtype) noexcept { return find(dtype) != nullptr; }

std::string to_string(DType dtype) {
  if (const Known* known = find(dtype)) return std::string(known->name);
  return "dlpack(code=" + std::to_string(dtype.code) + ", bits=" + std::to_string(dtype.bits) +
         ", lanes=" + std::to_string(dtype.lanes) + ")";
}

DType parse_dtype(std::string_view name) {
  std::string names;
  for (const Known& known : kKnown) {
    if (known.name == name) return known.dtype;
    names.append(names.empty() ? "" : ", ").append(known.name);
  }
  throw InputError("dtype '" + std::string(name) + "' is not known: choose one of " + names);
}

std::string to_typestr(DType dtype) {
  const Known* known = find(dtype);
  return known == nullptr ? std::string() : std::string(known->typestr);
}

DType parse_typestr(std::string_view typestr) {
  for (const Known& known : kKnown) {
    if (known.typestr.empty() || typestr.size() != known.typestr.size()) continue;
    // One byte has no order: '|', '<' and '=' are the same there.
    const bool order = typestr.front() == known.typestr.front() || typestr.front() == '=' ||
                       (known.dtype.bits == 8 && typestr.front() != '>');
    if (order && typestr.substr(1) == known.typestr.substr(1)) return known.dtype;
  }
  throw UnsupportedOperationError(
      "array type '" + std::string(typestr) +
      "' cannot be shared: only booleans, integers, floating-point and complex numbers in "
      "the byte order of this machine can; convert the array first");
}

}  // namespace xpuruntime

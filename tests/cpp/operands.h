// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/operand.h"

namespace xpuruntime::testing {

inline constexpr DType kF32{2, 32, 1};
inline constexpr DType kF16{2, 16, 1};
inline constexpr DType kBf16{4, 16, 1};
inline constexpr DeviceId kCpu{DeviceType::kCpu, 0};
inline constexpr DeviceId kCuda0{DeviceType::kCuda, 0};
inline constexpr DeviceId kCuda1{DeviceType::kCuda, 1};

/// An address for operands that nobody reads.
inline void* address(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

/// A contiguous operand at an address of its own.
inline Operand operand(const char* name, const std::vector<std::int64_t>& shape, DType dtype = kF32,
                       DeviceId device = kCuda0) {
  static std::uintptr_t next = 0;
  Operand made;
  made.name = name;
  made.absent = false;
  made.rank = static_cast<std::uint8_t>(shape.size());
  made.dtype = dtype;
  made.device = device;
  next += std::uintptr_t{1} << 32U;
  made.data = address(next);
  std::copy(shape.begin(), shape.end(), made.shape.begin());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    made.strides[i] = stride;
    stride *= made.shape[i];
  }
  return made;
}

inline Operand with_strides(Operand made, const std::vector<std::int64_t>& strides) {
  std::copy(strides.begin(), strides.end(), made.strides.begin());
  return made;
}

/// Left out by the caller.
inline Operand none(const char* name) {
  Operand made;
  made.name = name;
  return made;
}

/// The contiguous array that a caller makes for an output.
inline Operand made_for(const OutputSpec& spec, DeviceId device = kCuda0) {
  Operand made = operand(spec.name, {}, spec.dtype, device);
  made.rank = spec.rank;
  std::int64_t stride = 1;
  for (std::size_t i = spec.rank; i-- > 0;) {
    made.shape[i] = spec.shape[i];
    made.strides[i] = stride;
    stride *= spec.shape[i];
  }
  return made;
}

/// What `call` refuses, as text; empty when it does not.
template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

template <typename Call>
void expect_refused(Call call, const std::string& said) {
  const std::string text = refusal(call);
  EXPECT_NE(text.find(said), std::string::npos) << "expected: " << said << "\nsaid: " << text;
  EXPECT_NE(text.find(". Fix: "), std::string::npos) << "said: " << text;
}

inline std::string dims(const TensorDesc& tensor) {
  std::string text;
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(tensor.shape[i]);
  }
  text += "/";
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(tensor.strides[i]);
  }
  return text;
}

}  // namespace xpuruntime::testing

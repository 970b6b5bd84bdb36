// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/operand.h"

// Operands and devices to ask a CUDA library's backend about, where there are neither.
namespace xpuruntime::testing {

using Dims = std::vector<std::int64_t>;

inline constexpr DType kHalf{2, 16, 1};
inline constexpr DType kBfloat{4, 16, 1};
inline constexpr DType kSingle{2, 32, 1};
inline constexpr DType kDouble{2, 64, 1};
inline constexpr DType kFp8{10, 8, 1};
inline constexpr DType kBool{6, 8, 1};
inline constexpr DType kInt64{0, 64, 1};

/// Strides of an array without gaps.
inline Dims packed(const Dims& shape) {
  Dims strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

/// An operand on cuda:0, at an address that nothing reads. Packed where there are no strides.
inline Operand operand(const char* name, DType dtype, const Dims& shape, Dims strides = {},
                       std::uintptr_t address = 0x10000) {
  if (strides.empty()) strides = packed(shape);
  Operand made;
  made.name = name;
  made.absent = false;
  made.rank = static_cast<std::uint8_t>(shape.size());
  made.dtype = dtype;
  made.device = {DeviceType::kCuda, 0};
  made.data = reinterpret_cast<void*>(address);
  std::copy(shape.begin(), shape.end(), made.shape.begin());
  std::copy(strides.begin(), strides.end(), made.strides.begin());
  return made;
}

/// cuda:0 with that compute capability.
inline DeviceInfo device_of(int major, int minor) {
  DeviceInfo device;
  device.id = {DeviceType::kCuda, 0};
  device.compute_capability = {major, minor};
  return device;
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace xpuruntime::testing

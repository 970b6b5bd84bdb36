// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace xpuruntime {

enum class DeviceType : std::int8_t { kCpu, kCuda };

/// A device by type and index. `cpu` has index 0 only.
struct DeviceId {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const DeviceId&, const DeviceId&) = default;
};

/// "cpu" or "cuda:N".
std::string to_string(DeviceId device);
/// Parses "cpu", "cuda" (index 0) and "cuda:N". Throws InputError for anything else.
DeviceId parse_device(std::string_view text);

/// A `cudaStream_t` as an integer. 0 is the legacy default stream; on the CPU every stream is 0.
using StreamHandle = std::uintptr_t;

}  // namespace xpuruntime

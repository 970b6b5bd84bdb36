// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace xpuruntime::cublas {

/// An algorithm of cuBLASLt with its settings, by the numbers that cuBLASLt gives them.
struct LtConfig {
  std::int32_t algo = 0;
  std::uint32_t tile = 0;
  std::uint32_t stages = 0;
  std::int32_t splitk = 1;  ///< parts of k; negative numbers are modes of some algorithms
  std::uint32_t reduction = 0;
  std::uint32_t swizzle = 0;
  std::uint32_t custom = 0;
  std::uint16_t inner = 0;
  std::uint16_t cluster = 0;
  std::uint64_t workspace = 0;  ///< bytes that it may use

  friend bool operator==(const LtConfig&, const LtConfig&) = default;
};

/// "algo=66,tile=21,stages=31,splitk=1,reduction=0,swizzle=0,custom=0,inner=0,cluster=2,workspace=0"
std::string to_string(const LtConfig& config);
/// Throws InputError naming what is wrong: a name that is unknown, given twice or missing ("algo"
/// must be there, the others have the values above), or a value that is no number of its range.
LtConfig parse_lt_config(std::string_view text);

}  // namespace xpuruntime::cublas

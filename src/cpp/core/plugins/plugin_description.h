// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel_plugin.h"
#include "xpuruntime/op.h"

namespace xpuruntime {

/// Version 1 of kernel_plugin.h, which libraries that are built already speak: fixed arrays and
/// `float` attributes. Never changes.
namespace plugin_abi1 {

inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kMaxOperands = 11;
inline constexpr std::size_t kMaxRank = 4;

struct Tensor {
  std::int32_t present;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int32_t rank;
  std::int32_t alignment;
  std::int64_t shape[kMaxRank];
  std::int64_t strides[kMaxRank];
};

struct OpDescription {
  std::uint32_t size;
  std::int32_t op;
  std::int32_t phase;
  std::int32_t device_type;
  std::int32_t device_index;
  std::int32_t compute_capability;
  std::int32_t sm_count;
  std::int32_t operand_count;
  Tensor operands[kMaxOperands];
  float scale;
  float epsilon;
  float dropout_p;
  std::int32_t activation;
  std::int32_t causal;
  std::int32_t allow_tf32;
  std::int32_t deterministic;
  std::int32_t groups;
  std::int32_t stride[2];
  std::int32_t dilation[2];
  std::int32_t padding[4];
};

/// Why an operation cannot be described in version 1; empty where it can.
std::string why_not(const OpDesc& op);

}  // namespace plugin_abi1

/// An operation as a library of kernels reads it, in the version that it was built against. Refers
/// to the OpDesc, which must outlive it.
class PluginDescription {
 public:
  PluginDescription(const OpDesc& op, const DeviceInfo& device, std::uint32_t abi);
  PluginDescription(const PluginDescription&) = delete;
  PluginDescription& operator=(const PluginDescription&) = delete;

  /// For version 1 what it points at is a plugin_abi1::OpDescription.
  const XpuOpDescription* get() const noexcept {
    return first_.size != 0 ? reinterpret_cast<const XpuOpDescription*>(&first_) : &current_;
  }

 private:
  std::array<XpuTensor, kMaxSlots> tensors_{};
  std::array<const XpuTensor*, kMaxSlots> operands_{};
  XpuOpDescription current_{};
  plugin_abi1::OpDescription first_{};
};

}  // namespace xpuruntime

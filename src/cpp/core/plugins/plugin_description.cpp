// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "plugins/plugin_description.h"

#include <algorithm>
#include <cstddef>

namespace xpuruntime {
namespace {

static_assert(XPU_MATMUL == static_cast<int>(OpKind::kMatmul) &&
              XPU_ATTENTION == static_cast<int>(OpKind::kAttention) &&
              XPU_ATTENTION_BACKWARD == static_cast<int>(OpKind::kAttentionBackward) &&
              XPU_LAYER_NORM == static_cast<int>(OpKind::kLayerNorm) &&
              XPU_LAYER_NORM_BACKWARD == static_cast<int>(OpKind::kLayerNormBackward) &&
              XPU_RMS_NORM == static_cast<int>(OpKind::kRmsNorm) &&
              XPU_RMS_NORM_BACKWARD == static_cast<int>(OpKind::kRmsNormBackward) &&
              XPU_CONV == static_cast<int>(OpKind::kConv) &&
              XPU_CONV_INPUT_GRADIENT == static_cast<int>(OpKind::kConvInputGradient) &&
              XPU_CONV_WEIGHT_GRADIENT == static_cast<int>(OpKind::kConvWeightGradient) &&
              kOpKinds == 10);
static_assert(static_cast<int>(Phase::kInfer) == 0 && static_cast<int>(Phase::kTrain) == 1 &&
              static_cast<int>(Phase::kBackward) == 2);
static_assert(static_cast<int>(Activation::kRelu) == 1 &&
              static_cast<int>(Activation::kGelu) == 2 &&
              static_cast<int>(Activation::kGeluTanh) == 3 &&
              static_cast<int>(Activation::kSilu) == 4);
static_assert(static_cast<int>(Causal::kTopLeft) == 1 &&
              static_cast<int>(Causal::kBottomRight) == 2);

// What both versions call the same and hold in the same type.
template <typename Description>
void fill(Description& out, const OpDesc& op, const DeviceInfo& device) {
  out.size = sizeof(Description);
  out.op = static_cast<std::int32_t>(op.kind);
  out.phase = static_cast<std::int32_t>(op.phase);
  out.device_type = op.device.type == DeviceType::kCuda ? XPU_CUDA : XPU_CPU;
  out.device_index = op.device.index;
  out.compute_capability = device.compute_capability.first * 10 + device.compute_capability.second;
  out.sm_count = device.sm_count;
  out.operand_count = op.slots;
  const OpAttributes& given = op.attributes;
  out.dropout_p = given.dropout_p;
  out.activation = static_cast<std::int32_t>(given.activation);
  out.causal = static_cast<std::int32_t>(given.causal);
  out.allow_tf32 = given.allow_tf32 ? 1 : 0;
  out.deterministic = given.deterministic ? 1 : 0;
  out.groups = given.groups;
}

template <typename Tensor>
void fill(Tensor& to, const TensorDesc& from) {
  to.code = from.dtype.code;
  to.bits = from.dtype.bits;
  to.lanes = from.dtype.lanes;
  to.rank = from.rank;
  to.alignment = 1 << from.alignment;
}

bool is_float(double value) { return static_cast<double>(static_cast<float>(value)) == value; }

}  // namespace

namespace plugin_abi1 {

static_assert(sizeof(Tensor) == 80 && sizeof(OpDescription) == 976,
              "libraries that are built already have this layout");
static_assert(kMaxOperands >= kMaxSlots && kMaxRank >= TensorDesc::kMaxRank,
              "why_not must refuse an operation that has more than version 1 has room for");

std::string why_not(const OpDesc& op) {
  const OpAttributes& given = op.attributes;
  const char* const name = !is_float(given.scale)     ? "scale"
                           : !is_float(given.epsilon) ? "epsilon"
                                                      : nullptr;
  if (name == nullptr) return {};
  return std::string("it was built against version 1 of kernel_plugin.h, where ") + name +
         " is a float, which would round the one of this call: build it against version " +
         std::to_string(XPURUNTIME_KERNEL_ABI);
}

}  // namespace plugin_abi1

PluginDescription::PluginDescription(const OpDesc& op, const DeviceInfo& device,
                                     std::uint32_t abi) {
  const OpAttributes& given = op.attributes;
  if (abi == plugin_abi1::kVersion) {
    fill(first_, op, device);
    for (std::size_t slot = 0; slot < op.slots; ++slot) {
      const TensorDesc& from = op[slot];
      plugin_abi1::Tensor& to = first_.operands[slot];
      to.present = from.present;
      fill(to, from);
      std::copy(from.shape.begin(), from.shape.end(), to.shape);
      std::copy(from.strides.begin(), from.strides.end(), to.strides);
    }
    first_.scale = static_cast<float>(given.scale);
    first_.epsilon = static_cast<float>(given.epsilon);
    std::copy(given.stride.begin(), given.stride.end(), first_.stride);
    std::copy(given.dilation.begin(), given.dilation.end(), first_.dilation);
    std::copy(given.padding.begin(), given.padding.end(), first_.padding);
    return;
  }
  fill(current_, op, device);
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (!op.has(slot)) continue;
    XpuTensor& to = tensors_[slot];
    to.size = sizeof(XpuTensor);
    fill(to, op[slot]);
    to.shape = op[slot].shape.data();
    to.strides = op[slot].strides.data();
    operands_[slot] = &to;
  }
  current_.operands = operands_.data();
  current_.scale = given.scale;
  current_.epsilon = given.epsilon;
  current_.spatial_rank = is_conv(op.kind) ? static_cast<std::int32_t>(given.stride.size()) : 0;
  current_.stride = given.stride.data();
  current_.dilation = given.dilation.data();
  current_.padding = given.padding.data();
}

}  // namespace xpuruntime

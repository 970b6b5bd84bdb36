// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/conv_rules.h"

#include <string>

#include "cudnn/tensor_rules.h"

namespace xpuruntime::cudnn {
namespace {

Strides4 channels_first(const TensorDesc& t) noexcept {
  return {t.shape[1] * t.shape[2] * t.shape[3], t.shape[2] * t.shape[3], t.shape[3], 1};
}

Strides4 channels_last(const TensorDesc& t) noexcept {
  return {t.shape[1] * t.shape[2] * t.shape[3], 1, t.shape[1] * t.shape[3], t.shape[1]};
}

bool lies_as(const TensorDesc& tensor, const Strides4& strides) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != strides[i]) return false;
  }
  return true;
}

Strides4 settle(const TensorDesc& tensor, bool last) noexcept {
  const Strides4 wanted = last ? channels_last(tensor) : channels_first(tensor);
  if (lies_as(tensor, wanted)) return wanted;
  const Strides4 other = last ? channels_first(tensor) : channels_last(tensor);
  return lies_as(tensor, other) ? other : tensor.strides;
}

}  // namespace

Support check_conv(const OpDesc& op, const DeviceInfo& device) {
  if (op.device.type != DeviceType::kCuda) return Support::no("cuDNN serves CUDA devices only");
  if (device.compute_capability < std::pair(7, 5)) {
    return Support::no("cuDNN needs a device of compute capability 7.5 or newer");
  }
  const DType dtype = op[0].dtype;
  if (!is_half(dtype) && !is_single(dtype)) {
    return Support::no("these kernels are for float32, float16 and bfloat16, not " +
                       to_string(dtype));
  }
  if (dtype == DType{4, 16, 1} && device.compute_capability.first < 8) {
    return Support::no("bfloat16 needs a device of compute capability 8.0 or newer");
  }
  // Engines that fuse read in pieces of 16 bytes, and fault where cuDNN does not check that.
  constexpr std::size_t kBias = slots::Conv::kBias;
  const bool biased = op.kind == OpKind::kConv && op.has(kBias);
  const bool fused = biased || op.attributes.activation != Activation::kNone;
  const bool in_pieces = fused && (is_half(dtype) || op.attributes.allow_tf32);
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (!op.has(slot)) continue;
    const std::string name = "'" + std::string(slot_name(op.kind, slot)) + "'";
    if (op[slot].dtype != dtype)
      return Support::no(name + " is not of the dtype of '" + std::string(slot_name(op.kind, 0)) +
                         "'");
    if (!has_elements(op[slot])) return Support::no(name + " has no element");
    if (!has_positive_strides(op[slot])) {
      return Support::no(strides_of(op, slot) + ": cuDNN needs positive ones");
    }
    if (in_pieces && alignment_of(op[slot]) < 16) {
      return Support::no("the address of " + name + " is a multiple of " +
                         std::to_string(alignment_of(op[slot])) +
                         " bytes; with a bias or an activation cuDNN needs 16");
    }
  }
  if (biased && !is_packed(op[kBias])) {
    return Support::no(strides_of(op, kBias) + ": cuDNN needs it contiguous");
  }
  return Support::yes();
}

ConvStrides conv_strides(const OpDesc& op) noexcept {
  const ConvSlots slots = conv_slots(op.kind);
  bool first = false;
  for (const std::size_t slot : {slots.x, slots.out, slots.weight}) {
    const bool can_be_last = lies_as(op[slot], channels_last(op[slot]));
    const bool can_be_first = lies_as(op[slot], channels_first(op[slot]));
    if (can_be_last == can_be_first) continue;
    first = can_be_first;
    break;
  }
  return {settle(op[slots.x], !first), settle(op[slots.weight], !first),
          settle(op[slots.out], !first)};
}

}  // namespace xpuruntime::cudnn

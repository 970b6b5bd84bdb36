// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/attention_rules.h"

#include <string>

#include "cudnn/tensor_rules.h"

namespace xpuruntime::cudnn {
namespace {

// The slots of the forward and of the backward that mean the same.
struct Places {
  std::size_t q, k, v, out, lse, mask;
};

Places places_of(OpKind kind) noexcept {
  if (kind == OpKind::kAttention) {
    using Slot = slots::Attention;
    return {Slot::kQ, Slot::kK, Slot::kV, Slot::kOut, Slot::kLse, Slot::kMask};
  }
  using Slot = slots::AttentionBackward;
  return {Slot::kQ, Slot::kK, Slot::kV, Slot::kOut, Slot::kLse, Slot::kMask};
}

std::string name_of(const OpDesc& op, std::size_t slot) {
  return "'" + std::string(slot_name(op.kind, slot)) + "'";
}

// cuDNN reads and writes rows of head_dim elements in pieces of 16 bytes.
Support check_rows(const OpDesc& op, std::size_t slot, DType dtype) {
  const TensorDesc& tensor = op[slot];
  if (tensor.dtype != dtype) return Support::no(name_of(op, slot) + " is not of the dtype of 'q'");
  if (!has_elements(tensor)) return Support::no(name_of(op, slot) + " has no element");
  if (tensor.strides[3] != 1 || !has_positive_strides(tensor)) {
    return Support::no(strides_of(op, slot) +
                       ": cuDNN needs 1 for head_dim and positive ones elsewhere");
  }
  constexpr std::int64_t kPiece = 8;
  for (std::size_t i = 0; i < 3; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] % kPiece != 0) {
      return Support::no(strides_of(op, slot) + ": cuDNN needs multiples of 16 bytes");
    }
  }
  if (alignment_of(tensor) < 16) {
    return Support::no("the address of " + name_of(op, slot) + " is a multiple of " +
                       std::to_string(alignment_of(tensor)) + " bytes; cuDNN needs 16");
  }
  return Support::yes();
}

std::int64_t largest_head_dim(OpKind kind, std::pair<int, int> capability) noexcept {
  return kind == OpKind::kAttention || capability.first == 9 ? 256 : 128;
}

Support check_mask(const OpDesc& op, const Places& places) {
  const TensorDesc& mask = op[places.mask];
  if (!is_half(mask.dtype) && !is_single(mask.dtype)) {
    return Support::no("cuDNN takes masks that are added, and 'mask' is of dtype " +
                       to_string(mask.dtype));
  }
  if (is_half(mask.dtype) && mask.dtype != op[places.q].dtype) {
    return Support::no("'mask' is neither float32 nor of the dtype of 'q'");
  }
  if (mask.shape[3] != op[places.k].shape[2]) {
    return Support::no("'mask' is broadcast along kv_length, which cuDNN does not do");
  }
  if ((mask.shape[3] > 1 && mask.strides[3] != 1) || !has_positive_strides(mask)) {
    return Support::no(strides_of(op, places.mask) +
                       ": cuDNN needs 1 for kv_length and positive ones elsewhere");
  }
  return Support::yes();
}

Support check_causal(const OpDesc& op, const Places& places) {
  if (op.attributes.causal != Causal::kBottomRight) return Support::yes();
  const std::int64_t q_length = op[places.q].shape[2];
  const std::int64_t kv_length = op[places.k].shape[2];
  if (q_length > kv_length) {
    return Support::no("bottom-right causal with q_length " + std::to_string(q_length) +
                       " > kv_length " + std::to_string(kv_length) +
                       " leaves rows that see nothing, which cuDNN does not serve");
  }
  if (op.has(places.mask)) return Support::no("cuDNN adds no mask to bottom-right causal");
  if (op.attributes.dropout_p > 0.0F) {
    return Support::no("cuDNN has no dropout with bottom-right causal");
  }
  return Support::yes();
}

Support check_backward(const OpDesc& op, const Places& places, const DeviceInfo& device) {
  using Slot = slots::AttentionBackward;
  for (const std::size_t slot : {Slot::kGradOut, Slot::kGradQ, Slot::kGradK, Slot::kGradV}) {
    const Support support = check_rows(op, slot, op[places.q].dtype);
    if (!support.ok) return support;
  }
  if (op[places.q].shape[2] == 1 && op[places.k].shape[2] == 1) {
    return Support::no("cuDNN has no backward for q_length = kv_length = 1");
  }
  if (op.attributes.deterministic && op.attributes.dropout_p > 0.0F &&
      device.compute_capability.first == 10) {
    return Support::no(
        "cuDNN has no deterministic backward with dropout for devices of compute capability 10");
  }
  return Support::yes();
}

}  // namespace

Support check_attention(const OpDesc& op, const DeviceInfo& device) {
  if (op.device.type != DeviceType::kCuda) return Support::no("cuDNN serves CUDA devices only");
  if (device.compute_capability.first < 8) {
    return Support::no("cuDNN needs a device of compute capability 8.0 or newer for attention");
  }
  const Places places = places_of(op.kind);
  const TensorDesc& q = op[places.q];
  if (!is_half(q.dtype)) {
    return Support::no("cuDNN's attention is for float16 and bfloat16, not " + to_string(q.dtype));
  }
  const std::int64_t head_dim = q.shape[3];
  const std::int64_t largest = largest_head_dim(op.kind, device.compute_capability);
  if (head_dim % 8 != 0 || head_dim > largest) {
    return Support::no("head_dim is " + std::to_string(head_dim) +
                       "; cuDNN needs a multiple of 8 up to " + std::to_string(largest) + " here");
  }
  for (const std::size_t slot : {places.q, places.k, places.v, places.out}) {
    const Support support = check_rows(op, slot, q.dtype);
    if (!support.ok) return support;
  }
  if (op.has(places.lse) && !is_packed(op[places.lse])) {
    return Support::no(strides_of(op, places.lse) + ": cuDNN needs it contiguous");
  }
  if (op.has(places.mask)) {
    const Support support = check_mask(op, places);
    if (!support.ok) return support;
  }
  const Support causal = check_causal(op, places);
  if (!causal.ok || op.kind == OpKind::kAttention) return causal;
  return check_backward(op, places, device);
}

}  // namespace xpuruntime::cudnn

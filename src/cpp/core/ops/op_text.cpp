// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <charconv>
#include <span>

#include "xpuruntime/op.h"

namespace xpuruntime {
namespace {

// As short as it is exact; that of a float as a float's.
std::string number(double value) {
  std::array<char, 32> text{};
  const auto single = static_cast<float>(value);
  char* const last = text.data() + text.size();
  const auto end = static_cast<double>(single) == value
                       ? std::to_chars(text.data(), last, single).ptr
                       : std::to_chars(text.data(), last, value).ptr;
  return {text.data(), end};
}

template <typename Number>
std::string join(std::span<const Number> values, std::string_view between) {
  std::string text;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text.append(between);
    text.append(std::to_string(values[i]));
  }
  return text;
}

std::size_t rank_of(const TensorDesc& tensor) {
  return std::min<std::size_t>(tensor.rank, TensorDesc::kMaxRank);
}

std::string shape_text(const TensorDesc& tensor) {
  std::string text = "[";
  text.append(join(std::span(tensor.shape).first(rank_of(tensor)), ", ")).append("]");
  return text;
}

// A matrix as it lies in memory: stored by columns it is the transpose of what is stored.
std::string matrix_text(const TensorDesc& tensor) {
  const std::size_t rank = rank_of(tensor);
  if (rank < 2) return shape_text(tensor);
  const bool transposed = tensor.strides[rank - 1] != 1 && tensor.strides[rank - 2] == 1;
  if (!transposed) return shape_text(tensor);
  TensorDesc stored = tensor;
  std::swap(stored.shape[rank - 1], stored.shape[rank - 2]);
  return shape_text(stored) + "^T";
}

// "bf16", or the whole name of types that rules have no word for.
std::string dtype_text(const OpDesc& desc) {
  const std::string_view word = facts_of(desc).dtype;
  if (!word.empty()) return std::string(word);
  const std::size_t first = desc.kind == OpKind::kAttentionBackward
                                ? static_cast<std::size_t>(slots::AttentionBackward::kQ)
                                : 0;
  return to_string(desc[first].dtype);
}

std::string pair_text(const std::array<std::int32_t, 2>& pair) {
  return std::to_string(pair[0]) + "x" + std::to_string(pair[1]);
}

void describe_matmul(const OpDesc& desc, std::string& text) {
  text += matrix_text(desc[slots::Matmul::kA]) + " x " + matrix_text(desc[slots::Matmul::kB]);
  if (desc.has(slots::Matmul::kBias)) text += " + bias";
  if (desc[slots::Matmul::kOut].dtype != desc[slots::Matmul::kA].dtype) {
    text += " -> " + to_string(desc[slots::Matmul::kOut].dtype);
  }
}

void describe_attention(const OpDesc& desc, std::size_t q, std::size_t mask, std::string& text) {
  text += "q " + shape_text(desc[q]) + ", k " + shape_text(desc[q + 1]);
  if (desc.attributes.causal != Causal::kNone) {
    text +=
        desc.attributes.causal == Causal::kTopLeft ? ", causal" : ", causal from the bottom right";
  }
  if (desc.has(mask)) text += ", mask " + shape_text(desc[mask]);
  if (desc.attributes.dropout_p > 0) text += ", dropout " + number(desc.attributes.dropout_p);
}

void describe_norm(const OpDesc& desc, std::string& text) {
  text += shape_text(desc[slots::Norm::kX]);
  if (desc.has(slots::Norm::kResidual)) text += " + residual";
  if (desc.has(slots::Norm::kWeight)) text += ", weight";
  if (desc.has(slots::Norm::kBias)) text += ", bias";
}

void describe_norm_backward(const OpDesc& desc, std::string& text) {
  text += shape_text(desc[slots::NormBackward::kX]);
  if (desc.has(slots::NormBackward::kGradSum)) text += " + residual";
}

void describe_conv(const OpDesc& desc, std::string& text) {
  const ConvSlots slot = conv_slots(desc.kind);
  const TensorDesc& x = desc[slot.x];
  const OpAttributes& given = desc.attributes;
  text += shape_text(x);
  if (x.rank == 4 && x.shape[1] > 1 && x.strides[1] == 1) text += " channels last";
  text += " * " + shape_text(desc[slot.weight]);
  text += ", stride " + pair_text(given.stride) + ", padding " +
          join(std::span<const std::int32_t>(given.padding), ",");
  if (given.dilation != std::array<std::int32_t, 2>{1, 1}) {
    text += ", dilation " + pair_text(given.dilation);
  }
  if (given.groups != 1) text += ", groups " + std::to_string(given.groups);
  if (desc.kind == OpKind::kConv && desc.has(slots::Conv::kBias)) text += " + bias";
}

}  // namespace

std::string describe(const OpDesc& desc) {
  std::string text = std::string(to_string(desc.kind)) + " " + dtype_text(desc) + " ";
  switch (desc.kind) {
    case OpKind::kMatmul:
      describe_matmul(desc, text);
      break;
    case OpKind::kAttention:
      describe_attention(desc, slots::Attention::kQ, slots::Attention::kMask, text);
      break;
    case OpKind::kAttentionBackward:
      describe_attention(desc, slots::AttentionBackward::kQ, slots::AttentionBackward::kMask, text);
      break;
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
      describe_norm(desc, text);
      break;
    case OpKind::kLayerNormBackward:
    case OpKind::kRmsNormBackward:
      describe_norm_backward(desc, text);
      break;
    case OpKind::kConv:
    case OpKind::kConvInputGradient:
    case OpKind::kConvWeightGradient:
      describe_conv(desc, text);
      break;
  }
  if (desc.attributes.activation != Activation::kNone) {
    text.append(", ").append(to_string(desc.attributes.activation));
  }
  if (desc.attributes.deterministic) text += ", deterministic";
  return text + ", " + to_string(desc.device);
}

std::string to_key(const OpDesc& desc) {
  const OpAttributes& given = desc.attributes;
  std::string key = std::string(to_string(desc.kind)) + ";" + std::string(to_string(desc.phase));
  const auto add = [&key](std::string_view name, const std::string& value) {
    key.append(";").append(name).append("=").append(value);
  };
  if (given.scale != 0) add("scale", number(given.scale));
  if (given.epsilon != 0) add("epsilon", number(given.epsilon));
  if (given.dropout_p != 0) add("dropout", number(given.dropout_p));
  if (given.activation != Activation::kNone) {
    add("activation", std::string(to_string(given.activation)));
  }
  if (given.causal != Causal::kNone) {
    add("causal", given.causal == Causal::kTopLeft ? "top_left" : "bottom_right");
  }
  if (given.allow_tf32) add("tf32", "1");
  if (given.deterministic) add("deterministic", "1");
  if (is_conv(desc.kind)) {
    add("groups", std::to_string(given.groups));
    add("stride", pair_text(given.stride));
    add("dilation", pair_text(given.dilation));
    add("padding", join(std::span<const std::int32_t>(given.padding), ","));
  }
  for (std::size_t i = 0; i < desc.slots; ++i) {
    if (!desc.has(i)) continue;
    const TensorDesc& tensor = desc[i];
    const std::size_t rank = rank_of(tensor);
    add(slot_name(desc.kind, i), to_string(tensor.dtype) + "[" +
                                     join(std::span(tensor.shape).first(rank), ",") + "](" +
                                     join(std::span(tensor.strides).first(rank), ",") + ")@" +
                                     std::to_string(tensor.alignment));
  }
  return key;
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/op.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

struct OpFormat {
  std::string_view name;
  std::string_view key;
  std::size_t slots;
  std::size_t first_output;
  std::array<std::string_view, kMaxSlots> slot_names;
};

constexpr std::array<OpFormat, kOpKinds> kOps{{
    {"matmul",
     "matmul",
     slots::Matmul::kCount,
     slots::Matmul::kOut,
     {"a", "b", "bias", "scale_a", "scale_b", "out"}},
    {"attention",
     "attention",
     slots::Attention::kCount,
     slots::Attention::kOut,
     {"q", "k", "v", "mask", "rng", "out", "lse"}},
    {"attention_backward",
     "attention",
     slots::AttentionBackward::kCount,
     slots::AttentionBackward::kGradQ,
     {"grad_out", "q", "k", "v", "out", "lse", "mask", "rng", "grad_q", "grad_k", "grad_v"}},
    {"layer_norm",
     "layer_norm",
     slots::Norm::kCount,
     slots::Norm::kY,
     {"x", "residual", "weight", "bias", "y", "sum", "mean", "rstd"}},
    {"layer_norm_backward",
     "layer_norm",
     slots::NormBackward::kCount,
     slots::NormBackward::kGradX,
     {"grad_y", "x", "weight", "mean", "rstd", "grad_sum", "grad_x", "grad_weight", "grad_bias"}},
    {"rms_norm",
     "rms_norm",
     slots::Norm::kCount,
     slots::Norm::kY,
     {"x", "residual", "weight", "bias", "y", "sum", "mean", "rstd"}},
    {"rms_norm_backward",
     "rms_norm",
     slots::NormBackward::kCount,
     slots::NormBackward::kGradX,
     {"grad_y", "x", "weight", "mean", "rstd", "grad_sum", "grad_x", "grad_weight", "grad_bias"}},
    {"conv", "conv", slots::Conv::kCount, slots::Conv::kOut, {"x", "weight", "bias", "out"}},
    {"conv_input_gradient",
     "conv",
     slots::ConvInputGradient::kCount,
     slots::ConvInputGradient::kGradX,
     {"grad_out", "weight", "grad_x"}},
    {"conv_weight_gradient",
     "conv",
     slots::ConvWeightGradient::kCount,
     slots::ConvWeightGradient::kGradWeight,
     {"grad_out", "x", "grad_weight"}},
}};

constexpr std::array<std::string_view, 5> kActivations{"none", "relu", "gelu", "gelu_tanh", "silu"};
constexpr std::array<std::string_view, 3> kPhases{"infer", "train", "backward"};

const OpFormat& format(OpKind kind) noexcept { return kOps[static_cast<std::size_t>(kind)]; }

// Bytes are compared and hashed as they are.
static_assert(std::has_unique_object_representations_v<TensorDesc>);
static_assert(sizeof(OpAttributes) == 64, "no byte of it is padding");

std::uint64_t load(const void* from) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// One step of a hash: both halves of the product count.
std::uint64_t mix(std::uint64_t left, std::uint64_t right) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(left) * right;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64U);
}

constexpr std::uint64_t kFirst = 0x9E3779B97F4A7C15U, kSecond = 0xC2B2AE3D27D4EB4FU;

template <typename Names>
std::string join(const Names& names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

}  // namespace

std::string_view to_string(OpKind kind) noexcept { return format(kind).name; }
std::string_view policy_key(OpKind kind) noexcept { return format(kind).key; }

OpKind parse_op_kind(std::string_view name) {
  std::string names;
  for (std::size_t i = 0; i < kOpKinds; ++i) {
    if (kOps[i].name == name) return static_cast<OpKind>(i);
    names.append(names.empty() ? "" : ", ").append(kOps[i].name);
  }
  throw InputError("operation '" + std::string(name) + "' is not known. Fix: choose one of " +
                   names);
}

bool is_conv(OpKind kind) noexcept {
  return kind == OpKind::kConv || kind == OpKind::kConvInputGradient ||
         kind == OpKind::kConvWeightGradient;
}

ConvSlots conv_slots(OpKind kind) noexcept {
  using Input = slots::ConvInputGradient;
  using Weight = slots::ConvWeightGradient;
  switch (kind) {
    case OpKind::kConvInputGradient:
      return {Input::kGradX, Input::kWeight, Input::kGradOut};
    case OpKind::kConvWeightGradient:
      return {Weight::kX, Weight::kGradWeight, Weight::kGradOut};
    default:
      return {slots::Conv::kX, slots::Conv::kWeight, slots::Conv::kOut};
  }
}

std::size_t slot_count(OpKind kind) noexcept { return format(kind).slots; }

std::string_view slot_name(OpKind kind, std::size_t slot) noexcept {
  return slot < kMaxSlots ? format(kind).slot_names[slot] : std::string_view();
}

bool is_output(OpKind kind, std::size_t slot) noexcept {
  return format(kind).first_output <= slot && slot < format(kind).slots;
}

std::string_view to_string(Activation activation) noexcept {
  return kActivations[static_cast<std::size_t>(activation)];
}

Activation parse_activation(std::string_view name) {
  for (std::size_t i = 0; i < kActivations.size(); ++i) {
    if (kActivations[i] == name) return static_cast<Activation>(i);
  }
  throw InputError("activation '" + std::string(name) + "' is not known. Fix: choose one of " +
                   join(kActivations));
}

std::string_view to_string(Phase phase) noexcept {
  return kPhases[static_cast<std::size_t>(phase)];
}

bool operator==(const OpDesc& left, const OpDesc& right) noexcept {
  if (left.kind != right.kind || left.phase != right.phase || left.slots != right.slots ||
      left.device != right.device) {
    return false;
  }
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): floats by their bits, as promised
  if (std::memcmp(&left.attributes, &right.attributes, sizeof(OpAttributes)) != 0) return false;
  for (std::size_t i = 0; i < left.slots; ++i) {
    if (!left.has(i) && !right.has(i)) continue;
    if (std::memcmp(&left.tensors[i], &right.tensors[i], sizeof(TensorDesc)) != 0) return false;
  }
  return true;
}

std::size_t hash_value(const OpDesc& desc) noexcept {
  const auto* attributes = reinterpret_cast<const unsigned char*>(&desc.attributes);
  // Two chains, so that their multiplications overlap.
  std::uint64_t one = mix(load(attributes) ^ kFirst, load(attributes + 8) ^ kSecond);
  std::uint64_t two = mix(load(attributes + 16) ^ kSecond, load(attributes + 24) ^ kFirst);
  one = mix(one ^ load(attributes + 32), kFirst ^ load(attributes + 40));
  const std::uint64_t head = (static_cast<std::uint64_t>(desc.kind) << 40U) |
                             (static_cast<std::uint64_t>(desc.phase) << 32U) |
                             (static_cast<std::uint64_t>(desc.device.type) << 48U) |
                             static_cast<std::uint32_t>(desc.device.index);
  two = mix(two ^ load(attributes + 48), kSecond ^ load(attributes + 56));
  two = mix(two ^ head, kSecond);
  for (std::size_t i = 0; i < desc.slots; ++i) {
    if (!desc.has(i)) continue;
    const TensorDesc& tensor = desc.tensors[i];
    one = mix(one ^ load(&tensor), kFirst ^ i);
    const std::size_t rank = std::min<std::size_t>(tensor.rank, TensorDesc::kMaxRank);
    for (std::size_t dim = 0; dim < rank; ++dim) {
      two = mix(two ^ static_cast<std::uint64_t>(tensor.shape[dim]),
                kSecond ^ static_cast<std::uint64_t>(tensor.strides[dim]));
    }
  }
  return mix(one ^ kSecond, two ^ kFirst);
}

OpFacts facts_of(const OpDesc& desc) noexcept {
  OpFacts facts;
  std::size_t input = 0;
  switch (desc.kind) {
    case OpKind::kMatmul: {
      const TensorDesc& a = desc[slots::Matmul::kA];
      const TensorDesc& b = desc[slots::Matmul::kB];
      if (a.rank >= 2 && b.rank >= 2) {
        facts.m = a.shape[a.rank - 2U];
        facts.k = a.shape[a.rank - 1U];
        facts.n = b.shape[b.rank - 1U];
      }
      break;
    }
    case OpKind::kAttention:
    case OpKind::kAttentionBackward: {
      input = desc.kind == OpKind::kAttention
                  ? static_cast<std::size_t>(slots::Attention::kQ)
                  : static_cast<std::size_t>(slots::AttentionBackward::kQ);
      const TensorDesc& q = desc[input];
      if (q.rank >= 1) facts.head_dim = q.shape[q.rank - 1U];
      const TensorDesc& k = desc[input + 1U];  // keys follow queries
      if (k.rank >= 2) facts.kv = k.shape[k.rank - 2U];
      break;
    }
    default:
      break;
  }
  const DType dtype = desc[input].dtype;
  const bool rounds =
      desc.attributes.allow_tf32 && (desc.kind == OpKind::kMatmul || is_conv(desc.kind));
  switch (dtype.code) {
    case kDLFloat:
      facts.dtype = dtype.bits == 32   ? (rounds ? "tf32" : "fp32")
                    : dtype.bits == 16 ? "fp16"
                    : dtype.bits == 64 ? "fp64"
                                       : "";
      break;
    case kDLBfloat:
      facts.dtype = dtype.bits == 16 ? "bf16" : "";
      break;
    case kDLInt:
      facts.dtype = dtype.bits == 8 ? "int8" : dtype.bits == 4 ? "int4" : "";
      break;
    default:
      if (dtype.code >= kDLFloat8_e3m4 && dtype.code <= kDLFloat8_e8m0fnu) facts.dtype = "fp8";
      break;
  }
  return facts;
}

}  // namespace xpuruntime

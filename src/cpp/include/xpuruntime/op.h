// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "xpuruntime/dtype.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// What a kernel computes. Gradients are operations of their own, with kernels of their own.
enum class OpKind : std::uint8_t {
  kMatmul,
  kAttention,
  kAttentionBackward,
  kLayerNorm,
  kLayerNormBackward,
  kRmsNorm,
  kRmsNormBackward,
  kConv,
  kConvInputGradient,
  kConvWeightGradient,
};
inline constexpr std::size_t kOpKinds = 10;

/// "matmul", "attention", "attention_backward", ...
std::string_view to_string(OpKind kind) noexcept;
/// The key of a KernelPolicy that governs it: a gradient stands under the name of its operation.
std::string_view policy_key(OpKind kind) noexcept;
/// Throws InputError, which lists the names.
OpKind parse_op_kind(std::string_view name);

/// Operands by place; inputs first, then outputs. What a call leaves out is absent.
namespace slots {
/// out[.., m, n] = activation(scale_a * scale_b * (a[.., m, k] @ b[.., k, n]) + bias[n]). A batch
/// of `b` or `a` may be 1 or missing (rank 2). scale_a, scale_b: fp32, one element, for fp8 inputs.
struct Matmul {
  enum : std::uint8_t { kA, kB, kBias, kScaleA, kScaleB, kOut, kCount };
};
/// q[batch, heads, q_length, head_dim], k and v [batch, kv_heads, kv_length, head_dim], heads a
/// multiple of kv_heads. mask: [batch or 1, heads or 1, q_length or 1, kv_length], bool (true:
/// attend) or a float type that is added. rng: int64[2], seed and offset of the dropout. out as q.
/// lse: fp32 [batch, heads, q_length], the natural logarithm of the sum of exponentials, -inf for a
/// row that sees nothing (its output is 0).
struct Attention {
  enum : std::uint8_t { kQ, kK, kV, kMask, kRng, kOut, kLse, kCount };
};
struct AttentionBackward {
  enum : std::uint8_t {
    kGradOut,
    kQ,
    kK,
    kV,
    kOut,
    kLse,
    kMask,
    kRng,
    kGradQ,
    kGradK,
    kGradV,
    kCount
  };
};
/// s = x + residual; y = (s - mean(s)) * rstd(s) * weight + bias over the last dimension. x is
/// [rows, columns]. sum: s in the dtype of x. mean and rstd: fp32 [rows], or fp64
/// where x is. weight and bias [columns], in the dtype of x or fp32. An RMS norm has no bias and no
/// mean.
struct Norm {
  enum : std::uint8_t { kX, kResidual, kWeight, kBias, kY, kSum, kMean, kRstd, kCount };
};
/// x is what was normalized (s). grad_sum: gradient that arrives at `sum`, added to grad_x, which
/// is also the gradient of the residual.
struct NormBackward {
  enum : std::uint8_t {
    kGradY,
    kX,
    kWeight,
    kMean,
    kRstd,
    kGradSum,
    kGradX,
    kGradWeight,
    kGradBias,
    kCount
  };
};
/// x[batch, channels, height, width], weight[out_channels, channels / groups, kh, kw],
/// bias[out_channels]; out = activation(conv(x, weight) + bias). Layout by strides: NCHW or
/// channels last.
struct Conv {
  enum : std::uint8_t { kX, kWeight, kBias, kOut, kCount };
};
/// What a change of x or of weight is worth, by what a change of conv(x, weight) is: grad_out has
/// its shape, grad_x that of x and grad_weight that of weight. The third gradient, that of the
/// bias, is a plain sum of grad_out.
struct ConvInputGradient {
  enum : std::uint8_t { kGradOut, kWeight, kGradX, kCount };
};
struct ConvWeightGradient {
  enum : std::uint8_t { kGradOut, kX, kGradWeight, kCount };
};
}  // namespace slots
inline constexpr std::size_t kMaxSlots = 11;

/// Whether it is a convolution or one of its gradients.
bool is_conv(OpKind kind) noexcept;
/// Of those, the slots that have the shapes of x, weight and out.
struct ConvSlots {
  std::uint8_t x, weight, out;
};
ConvSlots conv_slots(OpKind kind) noexcept;

/// How many operands the operation has.
std::size_t slot_count(OpKind kind) noexcept;
/// "a", "grad_out", ...; empty for a slot that the operation has not.
std::string_view slot_name(OpKind kind, std::size_t slot) noexcept;
/// Whether a kernel writes the operand (and reads nothing of it).
bool is_output(OpKind kind, std::size_t slot) noexcept;

enum class Activation : std::uint8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };
std::string_view to_string(Activation activation) noexcept;
/// "none", "relu", "gelu" (by erf), "gelu_tanh", "silu". Throws InputError, which lists them.
Activation parse_activation(std::string_view name);

/// Which keys a query sees. Top left: row i sees columns 0..i. Bottom right: row i sees columns
/// 0..i + kv_length - q_length, which lines the last row up with the last key (decoding).
enum class Causal : std::uint8_t { kNone, kTopLeft, kBottomRight };

/// Where the call stands, for rules by phase.
enum class Phase : std::uint8_t { kInfer, kTrain, kBackward };
std::string_view to_string(Phase phase) noexcept;

/// Everything of an operand that may decide how a kernel is prepared: all but its address.
struct TensorDesc {
  static constexpr std::size_t kMaxRank = 4;

  DType dtype{};
  std::uint8_t present = 0;
  std::uint8_t rank = 0;
  /// log2 of the largest power of two up to 256 that divides the address. A prepared kernel is used
  /// for addresses of this alignment only.
  std::uint8_t alignment = 0;
  std::uint8_t reserved = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  ///< in elements

  friend bool operator==(const TensorDesc&, const TensorDesc&) = default;
};

/// What is not a tensor. Fields that an operation does not have keep these values.
struct OpAttributes {
  double scale = 0.0;      ///< attention: multiplies q @ k^T; a float's value unless q is float64
  double epsilon = 0.0;    ///< norms: added to the variance; a float's value unless x is float64
  float dropout_p = 0.0F;  ///< attention: probability to drop
  Activation activation = Activation::kNone;
  Causal causal = Causal::kNone;
  /// fp32 matmul and convolution may round their inputs to TF32.
  bool allow_tf32 = false;
  /// Only kernels that give the same bits in every run.
  bool deterministic = false;
  /// Convolution and its gradients.
  std::int32_t groups = 0;
  std::array<std::int32_t, 2> stride{};
  std::array<std::int32_t, 2> dilation{};
  std::array<std::int32_t, 4> padding{};  ///< top, left, bottom, right
  std::int32_t reserved = 0;

  friend bool operator==(const OpAttributes&, const OpAttributes&) = default;
};

/// One operation on tensors of given types, shapes, strides and alignments on one device: the key
/// under which a prepared kernel is kept. A plain value; made by the functions of matmul_op.h,
/// attention_op.h, norm_op.h and conv_op.h, which check it.
struct OpDesc {
  OpKind kind = OpKind::kMatmul;
  Phase phase = Phase::kInfer;
  std::uint8_t slots = 0;  ///< how many of `tensors` the operation has
  DeviceId device;
  OpAttributes attributes;
  std::array<TensorDesc, kMaxSlots> tensors{};

  const TensorDesc& operator[](std::size_t slot) const noexcept { return tensors[slot]; }
  bool has(std::size_t slot) const noexcept { return tensors[slot].present != 0; }

  /// Floats are compared by their bits; of operands that are absent nothing counts.
  friend bool operator==(const OpDesc& left, const OpDesc& right) noexcept;
};

std::size_t hash_value(const OpDesc& desc) noexcept;

/// The facts that rules ask for; -1 or empty where the operation has none.
struct OpFacts {
  std::int64_t m = -1, n = -1, k = -1;  ///< matmul; batches count into neither
  std::int64_t head_dim = -1;           ///< attention
  std::int64_t kv = -1;                 ///< attention: length of keys and values
  std::string_view dtype;               ///< "fp32", "tf32", "fp16", "bf16", "fp8", "fp64"
};
OpFacts facts_of(const OpDesc& desc) noexcept;

/// "matmul bf16 [16, 4096] x [4096, 4096]^T + bias, gelu, cuda:0".
std::string describe(const OpDesc& desc);
/// The same facts in a stable form for files: everything that `operator==` compares, except that
/// the device is left out.
std::string to_key(const OpDesc& desc);

}  // namespace xpuruntime

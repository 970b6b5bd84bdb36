// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/attention_op.h"

#include <cmath>
#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

constexpr const char* kForm = "[batch, heads, length, head_dim]";
constexpr DType kFloat32{2, 32, 1};

void require_size(const Operand& operand, std::size_t dimension, std::int64_t size,
                  const char* what) {
  if (operand.shape[dimension] == size) return;
  throw InputError(describe(operand) + " does not fit: its dimension " + std::to_string(dimension) +
                   " must be " + std::to_string(size) + ", the " + what +
                   ". Fix: reshape or cut it");
}

void check_mask(const AttentionInputs& inputs) {
  const Operand& mask = inputs.mask;
  if (mask.absent) return;
  require_same_device(inputs.q, mask);
  const bool is_bool = mask.dtype.code == 6 && mask.dtype.bits == 8;
  if (!is_bool && mask.dtype != inputs.q.dtype && mask.dtype != kFloat32) {
    throw InputError(describe(mask) +
                     " must be bool (true: attend), or to be added of float32 or of the dtype of "
                     "'q'. Fix: convert it");
  }
  if (mask.rank > 4) require_rank(mask, 4, "at most [batch, heads, q_length, kv_length]");
  const std::int64_t full[4] = {inputs.q.shape[0], inputs.q.shape[1], inputs.q.shape[2],
                                inputs.k.shape[2]};
  for (std::size_t i = 0; i < mask.rank; ++i) {
    const std::int64_t wanted = full[4U - mask.rank + i];
    if (mask.shape[i] != wanted && mask.shape[i] != 1) {
      throw InputError(describe(mask) + " does not broadcast to [" + std::to_string(full[0]) +
                       ", " + std::to_string(full[1]) + ", " + std::to_string(full[2]) + ", " +
                       std::to_string(full[3]) +
                       "], [batch, heads, q_length, kv_length]. Fix: reshape it");
    }
  }
}

void check_inputs(const AttentionInputs& inputs, const AttentionOptions& options) {
  const Operand& q = inputs.q;
  for (const Operand* operand : {&q, &inputs.k, &inputs.v}) {
    require_present(*operand);
    require_rank(*operand, 4, kForm);
    require_same_device(q, *operand);
    require_same_dtype(q, *operand);
  }
  if (!is_real(q.dtype)) {
    throw InputError(describe(q) +
                     " has a dtype without attention here. Fix: use float16, bfloat16, float32 or "
                     "float64");
  }
  require_size(inputs.k, 0, q.shape[0], "batch of 'q'");
  require_size(inputs.k, 3, q.shape[3], "head_dim of 'q'");
  require_size(inputs.v, 0, q.shape[0], "batch of 'q'");
  require_size(inputs.v, 1, inputs.k.shape[1], "number of heads of 'k'");
  require_size(inputs.v, 2, inputs.k.shape[2], "length of 'k'");
  require_size(inputs.v, 3, q.shape[3], "head_dim of 'q'");
  const std::int64_t heads = q.shape[1];
  const std::int64_t kv_heads = inputs.k.shape[1];
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
    throw InputError(describe(q) + " has " + std::to_string(heads) +
                     " heads, which is no multiple of the " + std::to_string(kv_heads) +
                     " heads of 'k'. Fix: pass as many heads of 'k' and 'v', or a divisor");
  }
  check_mask(inputs);
  if (!(options.dropout_p >= 0.0F && options.dropout_p < 1.0F)) {
    throw InputError("dropout_p is " + std::to_string(options.dropout_p) +
                     "; expected 0 <= dropout_p < 1. Fix: give 0.0");
  }
  const Operand& rng = inputs.rng;
  if (options.dropout_p > 0.0F && rng.absent) {
    throw InputError(
        "dropout_p is given without 'rng'. Fix: pass int64 [2] with seed and offset on the device "
        "of "
        "'q', so that the same elements can be dropped again in the backward");
  }
  if (!rng.absent) {
    require_same_device(q, rng);
    if (rng.dtype != DType{0, 64, 1} || rng.rank != 1 || rng.shape[0] != 2 || rng.strides[0] != 1) {
      throw InputError(describe(rng) +
                       " must be contiguous int64 [2]. Fix: pass seed and offset in one");
    }
  }
  if (options.scale && !std::isfinite(in_precision_of(inputs.q.dtype, *options.scale))) {
    throw InputError("scale is " + std::to_string(*options.scale) +
                     "; expected a finite number. Fix: leave it out");
  }
}

void set_mask(OpCall& call, std::size_t slot, const AttentionInputs& inputs) {
  if (inputs.mask.absent) return;
  const Operand& mask = inputs.mask;
  std::array<std::int64_t, 4> shape{1, 1, 1, 1};
  std::array<std::int64_t, 4> strides{};
  for (std::size_t i = 0; i < mask.rank; ++i) {
    shape[4U - mask.rank + i] = mask.shape[i];
    strides[4U - mask.rank + i] = mask.strides[i];
  }
  call.set(slot, mask, shape, strides);
}

void set_attributes(OpCall& call, const AttentionInputs& inputs, const AttentionOptions& options) {
  OpAttributes& attributes = call.desc.attributes;
  const auto head_dim = static_cast<double>(inputs.q.shape[3]);
  attributes.scale = in_precision_of(
      inputs.q.dtype, options.scale.value_or(head_dim > 0.0 ? 1.0 / std::sqrt(head_dim) : 1.0));
  attributes.causal = options.causal;
  attributes.dropout_p = options.dropout_p;
  attributes.allow_tf32 = options.allow_tf32 && inputs.q.dtype == kFloat32;
  attributes.deterministic = options.deterministic;
}

}  // namespace

OpCall make_attention(const AttentionInputs& inputs, const AttentionOptions& options) {
  using Slot = slots::Attention;
  check_inputs(inputs, options);
  OpCall call;
  call.begin(OpKind::kAttention, Slot::kCount, inputs.q.device);
  call.desc.phase = options.phase;
  set_attributes(call, inputs, options);
  call.set(Slot::kQ, inputs.q);
  call.set(Slot::kK, inputs.k);
  call.set(Slot::kV, inputs.v);
  set_mask(call, Slot::kMask, inputs);
  if (options.dropout_p > 0.0F) call.set(Slot::kRng, inputs.rng);
  call.add_output(output_like(inputs.q, "out", Slot::kOut), 4);
  if (options.want_lse) {
    OutputSpec lse = output_like(inputs.q, "lse", Slot::kLse);
    lse.rank = 3;
    lse.dtype = kFloat32;
    call.add_output(lse, 3);
  }
  return call;
}

OpCall make_attention_backward(const Operand& grad_out, const AttentionInputs& inputs,
                               const Operand& out, const Operand& lse,
                               const AttentionOptions& options) {
  using Slot = slots::AttentionBackward;
  check_inputs(inputs, options);
  for (const Operand* operand : {&grad_out, &out}) {
    require_present(*operand);
    require_rank(*operand, 4, kForm);
    require_same_device(inputs.q, *operand);
    require_same_dtype(inputs.q, *operand);
    for (std::size_t i = 0; i < 4; ++i) {
      require_size(*operand, i, inputs.q.shape[i], "same as of 'q'");
    }
  }
  require_present(lse);
  require_rank(lse, 3, "[batch, heads, q_length]");
  require_same_device(inputs.q, lse);
  for (std::size_t i = 0; i < 3; ++i) require_size(lse, i, inputs.q.shape[i], "same as of 'q'");
  if (lse.dtype != kFloat32)
    throw InputError(describe(lse) + " must be float32. Fix: pass that of the forward");
  OpCall call;
  call.begin(OpKind::kAttentionBackward, Slot::kCount, inputs.q.device);
  call.desc.phase = Phase::kBackward;
  set_attributes(call, inputs, options);
  call.set(Slot::kGradOut, grad_out);
  call.set(Slot::kQ, inputs.q);
  call.set(Slot::kK, inputs.k);
  call.set(Slot::kV, inputs.v);
  call.set(Slot::kOut, out);
  call.set(Slot::kLse, lse);
  set_mask(call, Slot::kMask, inputs);
  if (options.dropout_p > 0.0F) call.set(Slot::kRng, inputs.rng);
  call.add_output(output_like(inputs.q, "grad_q", Slot::kGradQ), 4);
  call.add_output(output_like(inputs.k, "grad_k", Slot::kGradK), 4);
  call.add_output(output_like(inputs.v, "grad_v", Slot::kGradV), 4);
  return call;
}

}  // namespace xpuruntime

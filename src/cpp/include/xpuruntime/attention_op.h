// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <optional>

#include "xpuruntime/op.h"
#include "xpuruntime/operand.h"

namespace xpuruntime {

struct AttentionInputs {
  Operand q;     ///< [batch, heads, q_length, head_dim]
  Operand k, v;  ///< [batch, kv_heads, kv_length, head_dim]
  Operand mask;  ///< broadcasts to [batch, heads, q_length, kv_length]; bool or a float type
  Operand rng;   ///< int64 [2] on the same device: seed and offset of the dropout
};

struct AttentionOptions {
  std::optional<double> scale;  ///< 1 / sqrt(head_dim) where it is not given
  Causal causal = Causal::kNone;
  float dropout_p = 0.0F;
  bool allow_tf32 = false;
  bool deterministic = false;
  bool want_lse = false;
  Phase phase = Phase::kInfer;
};

/// Outputs: `out` in the shape and dtype of q, and `lse` when it is wanted. Throws InputError
/// naming the argument.
OpCall make_attention(const AttentionInputs& inputs, const AttentionOptions& options);

/// `out` and `lse` are what the forward gave, `options` the same as there. Outputs: grad_q, grad_k,
/// grad_v.
OpCall make_attention_backward(const Operand& grad_out, const AttentionInputs& inputs,
                               const Operand& out, const Operand& lse,
                               const AttentionOptions& options);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operation.h"
#include "xpuruntime/attention_op.h"
#include "xpuruntime/error.h"

namespace xpuruntime::ort {
namespace {

using Slot = slots::Attention;

Causal causal_of(std::int64_t value) {
  switch (value) {
    case 0:
      return Causal::kNone;
    case 1:
      return Causal::kTopLeft;
    case 2:
      return Causal::kBottomRight;
    default:
      throw InputError("the attribute 'is_causal' is " + std::to_string(value) +
                       "; expected 0 (none), 1 (top left) or 2 (bottom right)");
  }
}

class Attention final : public Operation {
 public:
  explicit Attention(const Attributes& attributes)
      : q_heads_(attributes.integer("q_num_heads").value_or(0)),
        kv_heads_(attributes.integer("kv_num_heads").value_or(0)) {
    if (q_heads_ < 0 || kv_heads_ < 0) {
      throw InputError("q_num_heads and kv_num_heads are " + std::to_string(q_heads_) + " and " +
                       std::to_string(kv_heads_) + "; expected numbers that are not negative");
    }
    if (kv_heads_ == 0) kv_heads_ = q_heads_;
    options_.scale = attributes.number("scale");
    options_.causal = causal_of(attributes.integer("is_causal").value_or(0));
    options_.allow_tf32 = attributes.flag("allow_tf32");
    options_.deterministic = attributes.flag("deterministic");
  }

  Prepared prepare(std::span<const Operand> inputs) const override {
    const Operand& q = inputs[0];
    Prepared made;
    made.shape = q.shape;
    made.rank = q.rank;
    made.out = by_heads(q, q_heads_, "q_num_heads");
    made.call = make_attention({made.out,
                                by_heads(inputs[1], kv_heads_, "kv_num_heads"),
                                by_heads(inputs[2], kv_heads_, "kv_num_heads"),
                                inputs[3],
                                {}},
                               options_);
    made.out.name = "out";
    return made;
  }

  SymbolicShape infer(std::span<const SymbolicShape> inputs) const override { return inputs[0]; }

 private:
  // [batch, length, heads * head_dim] as [batch, heads, length, head_dim], where it lies; what has
  // four dimensions is that already.
  static Operand by_heads(const Operand& operand, std::int64_t heads, const char* attribute) {
    if (operand.rank == 4) return operand;
    require_rank(operand, 3,
                 "[batch, length, heads * head_dim], or [batch, heads, length, head_dim]");
    if (heads == 0 || operand.shape[2] % heads != 0) {
      throw InputError(describe(operand) + " cannot be split into heads: the attribute '" +
                       attribute + "' is " + std::to_string(heads));
    }
    Operand made = operand;
    made.rank = 4;
    const std::int64_t head_dim = operand.shape[2] / heads;
    made.shape = {operand.shape[0], heads, operand.shape[1], head_dim};
    made.strides = {operand.strides[0], head_dim, operand.strides[1], 1};
    return made;
  }

  std::int64_t q_heads_, kv_heads_;
  AttentionOptions options_;
};

constexpr std::array kInputs{InputSpec{"Q", Slot::kQ}, InputSpec{"K", Slot::kK},
                             InputSpec{"V", Slot::kV},
                             InputSpec{"mask", Slot::kMask, InputTypes::kMask, true}};
constexpr std::array kAttributes{AttributeSpec{"q_num_heads", "int"},
                                 AttributeSpec{"kv_num_heads", "int"},
                                 AttributeSpec{"is_causal", "int"}, AttributeSpec{"scale", "float"},
                                 AttributeSpec{"allow_tf32", "int"}};

std::unique_ptr<const Operation> make(const Attributes& attributes) {
  return std::make_unique<Attention>(attributes);
}

}  // namespace

const OpSpec kAttention{"Attention", kInputs, kAttributes, make};

}  // namespace xpuruntime::ort

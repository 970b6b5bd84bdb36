// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operation.h"
#include "xpuruntime/error.h"
#include "xpuruntime/norm_op.h"

namespace xpuruntime::ort {
namespace {

using Slot = slots::Norm;

// All dimensions from `first` on as one; the operand is contiguous.
Operand joined_from(const Operand& operand, std::size_t first) {
  Operand made = operand;
  if (operand.absent || operand.rank <= first + 1) return made;
  std::int64_t columns = 1;
  for (std::size_t i = first; i < operand.rank; ++i) columns *= operand.shape[i];
  made.rank = static_cast<std::uint8_t>(first + 1);
  made.shape[first] = columns;
  made.strides[first] = 1;
  return made;
}

class Norm final : public Operation {
 public:
  Norm(const Attributes& attributes, bool rms) : axis_(attributes.integer("axis").value_or(-1)) {
    options_.rms = rms;
    options_.epsilon = attributes.number("epsilon").value_or(1e-5F);
    options_.deterministic = attributes.flag("deterministic");
  }

  Prepared prepare(std::span<const Operand> inputs) const override {
    const Operand& x = inputs[0];
    const auto rank = static_cast<std::int64_t>(x.rank);
    if (axis_ < -rank || axis_ >= rank) {
      throw InputError("the attribute 'axis' is " + std::to_string(axis_) + ", and " + describe(x) +
                       " has " + std::to_string(rank) + " dimensions");
    }
    const auto axis = static_cast<std::size_t>(axis_ < 0 ? axis_ + rank : axis_);
    Prepared made;
    made.call = make_norm(
        {joined_from(x, axis), {}, joined_from(inputs[1], 0), joined_from(inputs[2], 0)}, options_);
    made.out = contiguous_output(made.call);
    made.shape = x.shape;
    made.rank = x.rank;
    return made;
  }

  SymbolicShape infer(std::span<const SymbolicShape> inputs) const override { return inputs[0]; }

 private:
  std::int64_t axis_;
  NormOptions options_;
};

constexpr std::array kInputs{InputSpec{"X", Slot::kX},
                             InputSpec{"scale", Slot::kWeight, InputTypes::kSameOrFp32},
                             InputSpec{"bias", Slot::kBias, InputTypes::kSameOrFp32, true}};
constexpr std::array kAttributes{AttributeSpec{"axis", "int"}, AttributeSpec{"epsilon", "float"}};

std::unique_ptr<const Operation> make_layer_norm(const Attributes& attributes) {
  return std::make_unique<Norm>(attributes, false);
}

std::unique_ptr<const Operation> make_rms_norm(const Attributes& attributes) {
  return std::make_unique<Norm>(attributes, true);
}

}  // namespace

const OpSpec kLayerNormalization{"LayerNormalization", kInputs, kAttributes, make_layer_norm};
const OpSpec kRmsNormalization{"RMSNormalization", std::span(kInputs).first(2), kAttributes,
                               make_rms_norm};

}  // namespace xpuruntime::ort

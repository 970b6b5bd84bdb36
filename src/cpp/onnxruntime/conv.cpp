// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "operation.h"
#include "xpuruntime/conv_op.h"
#include "xpuruntime/error.h"

namespace xpuruntime::ort {
namespace {

using Slot = slots::Conv;

// [n, c, w] as [n, c, 1, w].
Operand with_height(const Operand& operand) {
  Operand made = operand;
  if (operand.absent || operand.rank != 3) return made;
  made.rank = 4;
  made.shape[3] = operand.shape[2];
  made.strides[3] = operand.strides[2];
  made.shape[2] = 1;
  made.strides[2] = operand.shape[2] * operand.strides[2];
  return made;
}

// One number for each spatial dimension; a missing list means `missing` everywhere. Dimensions that
// were added stand in front.
template <std::size_t kCount>
std::array<std::int32_t, kCount> spread(const std::vector<std::int64_t>& given, std::size_t spatial,
                                        std::int32_t missing, const char* name) {
  constexpr std::size_t kEnds = kCount / 2;  // 1: a number a dimension; 2: one for each end
  std::array<std::int32_t, kCount> all{};
  all.fill(missing);
  if (given.empty()) return all;
  if (given.size() != kEnds * spatial) {
    throw InputError("the attribute '" + std::string(name) + "' has " +
                     std::to_string(given.size()) + " numbers; expected " +
                     std::to_string(kEnds * spatial) + " for " + std::to_string(spatial) +
                     " spatial dimensions");
  }
  for (std::size_t end = 0; end < kEnds; ++end) {
    for (std::size_t i = 0; i < spatial; ++i) {
      all[end * 2 + 2 - spatial + i] = small_integer(given[end * spatial + i], name);
    }
  }
  return all;
}

class Conv final : public Operation {
 public:
  explicit Conv(const Attributes& attributes)
      : strides_(attributes.integers("strides").value_or(std::vector<std::int64_t>{})),
        pads_(attributes.integers("pads").value_or(std::vector<std::int64_t>{})),
        dilations_(attributes.integers("dilations").value_or(std::vector<std::int64_t>{})) {
    options_.groups = small_integer(attributes.integer("group").value_or(1), "group");
    options_.activation = activation_of(attributes);
    options_.allow_tf32 = attributes.flag("allow_tf32");
    options_.deterministic = attributes.flag("deterministic");
  }

  Prepared prepare(std::span<const Operand> inputs) const override {
    const Operand& x = inputs[0];
    const Operand& weight = inputs[1];
    if (x.rank != weight.rank || x.rank < 3 || x.rank > 4) {
      throw InputError(describe(x) + " and " + describe(weight) +
                       " have not both one or both two spatial dimensions: other convolutions are "
                       "not served here");
    }
    Prepared made;
    made.call = make_conv({with_height(x), with_height(weight), inputs[2]}, options(x.rank - 2U));
    made.out = contiguous_output(made.call);
    made.shape = made.out.shape;
    made.rank = x.rank;
    if (x.rank == 3) made.shape[2] = made.out.shape[3];
    return made;
  }

  SymbolicShape infer(std::span<const SymbolicShape> inputs) const override {
    if (!inputs[0] || !inputs[1]) return std::nullopt;
    const std::vector<Dim>& x = *inputs[0];
    const std::vector<Dim>& weight = *inputs[1];
    if (x.size() != weight.size() || x.size() < 3 || x.size() > 4) return std::nullopt;
    const std::size_t spatial = x.size() - 2;
    const ConvOptions all = options(spatial);
    std::vector<Dim> out{x[0], weight[0]};
    for (std::size_t i = 2 - spatial; i < 2; ++i) {
      const Dim& size = x[i + spatial];
      const Dim& kernel = weight[i + spatial];
      Dim made;
      if (size.known() && kernel.known() && all.stride[i] > 0) {
        const std::int64_t reach = (kernel.value - 1) * all.dilation[i] + 1;
        const std::int64_t room = size.value + all.padding[i] + all.padding[i + 2] - reach;
        if (room < 0) return std::nullopt;
        made.value = room / all.stride[i] + 1;
      }
      out.push_back(made);
    }
    return out;
  }

 private:
  ConvOptions options(std::size_t spatial) const {
    ConvOptions made = options_;
    made.stride = spread<2>(strides_, spatial, 1, "strides");
    made.padding = spread<4>(pads_, spatial, 0, "pads");
    made.dilation = spread<2>(dilations_, spatial, 1, "dilations");
    return made;
  }

  std::vector<std::int64_t> strides_, pads_, dilations_;
  ConvOptions options_;
};

constexpr std::array kInputs{InputSpec{"X", Slot::kX}, InputSpec{"W", Slot::kWeight},
                             InputSpec{"B", Slot::kBias, InputTypes::kSame, true}};
constexpr std::array kAttributes{
    AttributeSpec{"strides", "ints"},      AttributeSpec{"pads", "ints"},
    AttributeSpec{"dilations", "ints"},    AttributeSpec{"group", "int"},
    AttributeSpec{"activation", "string"}, AttributeSpec{"allow_tf32", "int"}};

std::unique_ptr<const Operation> make(const Attributes& attributes) {
  return std::make_unique<Conv>(attributes);
}

}  // namespace

const OpSpec kConv{"Conv", kInputs, kAttributes, make};

}  // namespace xpuruntime::ort

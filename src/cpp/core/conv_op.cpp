// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/conv_op.h"

#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

void require_positive(std::int32_t value, const char* name) {
  if (value >= 1) return;
  throw InputError(std::string(name) + " has " + std::to_string(value) +
                   "; expected numbers from 1 on");
}

void check_options(const ConvOptions& options) {
  for (const std::int32_t value : options.stride) require_positive(value, "stride");
  for (const std::int32_t value : options.dilation) require_positive(value, "dilation");
  require_positive(options.groups, "groups");
  for (const std::int32_t value : options.padding) {
    if (value < 0) {
      throw InputError("padding has " + std::to_string(value) +
                       "; expected numbers that are not negative");
    }
  }
}

void check_inputs(const ConvInputs& inputs, const ConvOptions& options) {
  const Operand& x = inputs.x;
  const Operand& weight = inputs.weight;
  require_present(x);
  require_present(weight);
  require_rank(x, 4, "[batch, channels, height, width]");
  require_rank(weight, 4, "[out_channels, channels / groups, kernel_height, kernel_width]");
  require_same_device(x, weight);
  require_same_dtype(x, weight);
  if (!is_real(x.dtype)) {
    throw InputError(describe(x) +
                     " has a dtype without convolution here: use float16, bfloat16, float32 or "
                     "float64");
  }
  check_options(options);
  if (x.shape[1] % options.groups != 0 || weight.shape[0] % options.groups != 0) {
    throw InputError("groups is " + std::to_string(options.groups) +
                     ", which divides not both the channels of " + describe(x) +
                     " and the out_channels of " + describe(weight));
  }
  if (weight.shape[1] != x.shape[1] / options.groups) {
    throw InputError(describe(weight) + " does not fit " + describe(x) + " in " +
                     std::to_string(options.groups) + " groups: its dimension 1 must be " +
                     std::to_string(x.shape[1] / options.groups));
  }
  if (weight.shape[2] < 1 || weight.shape[3] < 1) {
    throw InputError(describe(weight) + " has an empty kernel");
  }
  const Operand& bias = inputs.bias;
  if (!bias.absent) {
    require_same_device(x, bias);
    require_same_dtype(x, bias);
    if (bias.rank != 1 || bias.shape[0] != weight.shape[0]) {
      throw InputError(describe(bias) + " must be [" + std::to_string(weight.shape[0]) +
                       "], one for each output channel");
    }
  }
}

}  // namespace

bool is_channels_last(const Operand& x) noexcept {
  return x.rank == 4 && x.shape[1] > 1 && x.strides[1] == 1 && x.strides[3] == x.shape[1] &&
         x.strides[2] == x.shape[1] * x.shape[3];
}

OpCall make_conv(const ConvInputs& inputs, const ConvOptions& options) {
  using Slot = slots::Conv;
  check_inputs(inputs, options);
  const Operand& x = inputs.x;
  const Operand& weight = inputs.weight;
  OutputSpec out;
  out.name = "out";
  out.slot = Slot::kOut;
  out.dtype = x.dtype;
  out.rank = 4;
  out.shape[0] = x.shape[0];
  out.shape[1] = weight.shape[0];
  out.channels_last = is_channels_last(x);
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int64_t padded = x.shape[2 + i] + options.padding[i] + options.padding[i + 2];
    const std::int64_t reach = (weight.shape[2 + i] - 1) * options.dilation[i] + 1;
    if (padded < reach) {
      throw InputError(describe(weight) + " with dilation reaches over " + std::to_string(reach) +
                       " elements, more than the " + std::to_string(padded) + " of " + describe(x) +
                       " with padding");
    }
    out.shape[2 + i] = (padded - reach) / options.stride[i] + 1;
  }
  OpCall call;
  call.begin(OpKind::kConv, Slot::kCount, x.device);
  call.desc.phase = options.phase;
  OpAttributes& attributes = call.desc.attributes;
  attributes.activation = options.activation;
  attributes.allow_tf32 = options.allow_tf32 && is_float(x.dtype, 32);
  attributes.deterministic = options.deterministic;
  attributes.groups = options.groups;
  attributes.stride = options.stride;
  attributes.dilation = options.dilation;
  attributes.padding = options.padding;
  call.set(Slot::kX, x);
  call.set(Slot::kWeight, weight);
  call.set(Slot::kBias, inputs.bias);
  call.add_output(out, 4);
  return call;
}

}  // namespace xpuruntime

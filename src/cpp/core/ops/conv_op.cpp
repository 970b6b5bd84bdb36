// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/conv_op.h"

#include <algorithm>
#include <optional>
#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

void require_positive(std::int32_t value, const char* name) {
  if (value >= 1) return;
  throw InputError(std::string(name) + " has " + std::to_string(value) +
                   "; expected numbers from 1 on. Fix: give 1");
}

void check_options(const ConvOptions& options) {
  for (const std::int32_t value : options.stride) require_positive(value, "stride");
  for (const std::int32_t value : options.dilation) require_positive(value, "dilation");
  require_positive(options.groups, "groups");
  for (const std::int32_t value : options.padding) {
    if (value < 0) {
      throw InputError("padding has " + std::to_string(value) +
                       "; expected numbers that are not negative. Fix: give 0");
    }
  }
}

void require_dtype(const Operand& operand) {
  if (is_real(operand.dtype)) return;
  throw InputError(describe(operand) +
                   " has a dtype without convolution here. Fix: use float16, bfloat16, float32 or "
                   "float64");
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
  require_dtype(x);
  check_options(options);
  if (x.shape[1] % options.groups != 0 || weight.shape[0] % options.groups != 0) {
    throw InputError("groups is " + std::to_string(options.groups) +
                     ", which divides not both the channels of " + describe(x) +
                     " and the out_channels of " + describe(weight) +
                     ". Fix: give 1, or a divisor of both");
  }
  if (weight.shape[1] != x.shape[1] / options.groups) {
    throw InputError(describe(weight) + " does not fit " + describe(x) + " in " +
                     std::to_string(options.groups) + " groups: its dimension 1 must be " +
                     std::to_string(x.shape[1] / options.groups) +
                     ". Fix: give other groups, or cut the channels");
  }
  if (weight.shape[2] < 1 || weight.shape[3] < 1) {
    throw InputError(describe(weight) + " has an empty kernel. Fix: pass one of 1x1 or more");
  }
  const Operand& bias = inputs.bias;
  if (!bias.absent) {
    require_same_device(x, bias);
    require_same_dtype(x, bias);
    if (bias.rank != 1 || bias.shape[0] != weight.shape[0]) {
      throw InputError(describe(bias) + " must be [" + std::to_string(weight.shape[0]) +
                       "], one for each output channel. Fix: reshape or cut it");
    }
  }
}

/// Height or width of the result; empty where the kernel reaches over more than there is.
std::optional<std::int64_t> result_size(std::int64_t size, std::int64_t kernel, std::size_t i,
                                        const ConvOptions& options) {
  const std::int64_t padded = size + options.padding[i] + options.padding[i + 2];
  const std::int64_t reach = (kernel - 1) * options.dilation[i] + 1;
  if (padded < reach) return std::nullopt;
  return (padded - reach) / options.stride[i] + 1;
}

void check_gradient(const Operand& grad_out, const Operand& other, const char* form,
                    const ConvOptions& options) {
  require_present(grad_out);
  require_present(other);
  require_rank(grad_out, 4, "[batch, out_channels, out_height, out_width]");
  require_rank(other, 4, form);
  require_same_device(grad_out, other);
  require_same_dtype(grad_out, other);
  require_dtype(grad_out);
  check_options(options);
  if (options.activation != Activation::kNone) {
    throw InputError("a gradient of a convolution with the activation '" +
                     std::string(to_string(options.activation)) +
                     "' is asked for. Fix: take that of the activation first");
  }
}

void require_size(std::int32_t value, std::int32_t least, const char* name) {
  if (value >= least) return;
  throw InputError(std::string(name) + " has " + std::to_string(value) +
                   "; expected numbers from " + std::to_string(least) + " on. Fix: give " +
                   std::to_string(least));
}

/// Height and width of grad_out must be those of the convolution of `x` with `kernel`.
void require_result_size(const Operand& grad_out, std::array<std::int64_t, 2> x,
                         std::array<std::int64_t, 2> kernel, const ConvOptions& options) {
  for (std::size_t i = 0; i < 2; ++i) {
    const auto size = result_size(x[i], kernel[i], i, options);
    if (size == grad_out.shape[2 + i]) continue;
    const std::string what = std::string(i == 0 ? "height " : "width ") + std::to_string(x[i]) +
                             " with a kernel of " + std::to_string(kernel[i]);
    throw InputError(describe(grad_out) + " is not the gradient of such a convolution: " + what +
                     (size ? " gives " + std::to_string(*size) : " gives nothing") +
                     ". Fix: pass the gradient of what the forward gave, and its options");
  }
}

void require_groups(const Operand& operand, std::size_t dimension, const ConvOptions& options) {
  if (operand.shape[dimension] % options.groups == 0) return;
  throw InputError("groups is " + std::to_string(options.groups) +
                   ", which does not divide dimension " + std::to_string(dimension) + " of " +
                   describe(operand) + ". Fix: give 1, or a divisor of it");
}

OpCall begin(OpKind kind, std::size_t slots, const Operand& first, Phase phase,
             const ConvOptions& options) {
  OpCall call;
  call.begin(kind, slots, first.device);
  call.desc.phase = phase;
  OpAttributes& attributes = call.desc.attributes;
  attributes.activation = options.activation;
  attributes.allow_tf32 = options.allow_tf32 && is_float(first.dtype, 32);
  attributes.deterministic = options.deterministic;
  attributes.groups = options.groups;
  attributes.stride = options.stride;
  attributes.dilation = options.dilation;
  attributes.padding = options.padding;
  return call;
}

OutputSpec output(const char* name, std::uint8_t slot, const Operand& like,
                  std::array<std::int64_t, 4> shape) {
  OutputSpec spec;
  spec.name = name;
  spec.slot = slot;
  spec.dtype = like.dtype;
  spec.rank = 4;
  std::copy(shape.begin(), shape.end(), spec.shape.begin());
  spec.channels_last = is_channels_last(like);
  return spec;
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
  std::array<std::int64_t, 4> shape{x.shape[0], weight.shape[0]};
  for (std::size_t i = 0; i < 2; ++i) {
    const auto size = result_size(x.shape[2 + i], weight.shape[2 + i], i, options);
    if (!size) {
      const std::int64_t padded = x.shape[2 + i] + options.padding[i] + options.padding[i + 2];
      const std::int64_t reach = (weight.shape[2 + i] - 1) * options.dilation[i] + 1;
      throw InputError(describe(weight) + " with dilation reaches over " + std::to_string(reach) +
                       " elements, more than the " + std::to_string(padded) + " of " + describe(x) +
                       " with padding. Fix: pad more, or use a smaller kernel");
    }
    shape[2 + i] = *size;
  }
  OpCall call = begin(OpKind::kConv, Slot::kCount, x, options.phase, options);
  call.set(Slot::kX, x);
  call.set(Slot::kWeight, weight);
  call.set(Slot::kBias, inputs.bias);
  call.add_output(output("out", Slot::kOut, x, shape), 4);
  return call;
}

OpCall make_conv_input_gradient(const Operand& grad_out, const Operand& weight,
                                const std::array<std::int32_t, 2>& size,
                                const ConvOptions& options) {
  using Slot = slots::ConvInputGradient;
  check_gradient(grad_out, weight, "[out_channels, channels / groups, kernel_height, kernel_width]",
                 options);
  for (const std::int32_t one : size) require_size(one, 0, "input_size");
  require_groups(weight, 0, options);
  if (grad_out.shape[1] != weight.shape[0]) {
    throw InputError(describe(grad_out) + " does not fit " + describe(weight) +
                     ": its dimension 1 must be " + std::to_string(weight.shape[0]) +
                     ". Fix: pass the gradient of what the forward gave");
  }
  if (weight.shape[2] < 1 || weight.shape[3] < 1) {
    throw InputError(describe(weight) + " has an empty kernel. Fix: pass one of 1x1 or more");
  }
  require_result_size(grad_out, {size[0], size[1]}, {weight.shape[2], weight.shape[3]}, options);
  OpCall call =
      begin(OpKind::kConvInputGradient, Slot::kCount, grad_out, Phase::kBackward, options);
  call.set(Slot::kGradOut, grad_out);
  call.set(Slot::kWeight, weight);
  call.add_output(output("grad_x", Slot::kGradX, grad_out,
                         {grad_out.shape[0], weight.shape[1] * options.groups, size[0], size[1]}),
                  4);
  return call;
}

OpCall make_conv_weight_gradient(const Operand& grad_out, const Operand& x,
                                 const std::array<std::int32_t, 2>& size,
                                 const ConvOptions& options) {
  using Slot = slots::ConvWeightGradient;
  check_gradient(grad_out, x, "[batch, channels, height, width]", options);
  for (const std::int32_t one : size) require_size(one, 1, "kernel_size");
  require_groups(grad_out, 1, options);
  require_groups(x, 1, options);
  if (grad_out.shape[0] != x.shape[0]) {
    throw InputError(describe(grad_out) + " does not fit " + describe(x) +
                     ": its dimension 0 must be " + std::to_string(x.shape[0]) +
                     ". Fix: pass the gradient of what the forward gave");
  }
  require_result_size(grad_out, {x.shape[2], x.shape[3]}, {size[0], size[1]}, options);
  OpCall call =
      begin(OpKind::kConvWeightGradient, Slot::kCount, grad_out, Phase::kBackward, options);
  call.set(Slot::kGradOut, grad_out);
  call.set(Slot::kX, x);
  call.add_output(output("grad_weight", Slot::kGradWeight, x,
                         {grad_out.shape[1], x.shape[1] / options.groups, size[0], size[1]}),
                  4);
  return call;
}

}  // namespace xpuruntime

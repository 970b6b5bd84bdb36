// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>

#include "xpuruntime/op.h"
#include "xpuruntime/operand.h"

namespace xpuruntime {

struct ConvInputs {
  Operand x;       ///< [batch, channels, height, width]
  Operand weight;  ///< [out_channels, channels / groups, kernel_height, kernel_width]
  Operand bias;    ///< [out_channels]
};

struct ConvOptions {
  std::array<std::int32_t, 2> stride{1, 1};
  std::array<std::int32_t, 2> dilation{1, 1};
  std::array<std::int32_t, 4> padding{};  ///< top, left, bottom, right
  std::int32_t groups = 1;
  Activation activation = Activation::kNone;
  bool allow_tf32 = false;
  bool deterministic = false;
  Phase phase = Phase::kInfer;
};

/// One output, `out`. Throws InputError naming the argument.
OpCall make_conv(const ConvInputs& inputs, const ConvOptions& options);

/// The gradient with respect to x of a convolution of these options, which must have no activation:
/// `grad_x` [batch, channels, *size]. `grad_out` is what arrives at its result, and `size` height
/// and width of x, which the shapes leave open where the stride is not 1. Throws InputError naming
/// the argument.
OpCall make_conv_input_gradient(const Operand& grad_out, const Operand& weight,
                                const std::array<std::int32_t, 2>& size,
                                const ConvOptions& options);
/// The gradient with respect to weight, `grad_weight` [out_channels, channels / groups, *size]:
/// `size` is height and width of the kernel.
OpCall make_conv_weight_gradient(const Operand& grad_out, const Operand& x,
                                 const std::array<std::int32_t, 2>& size,
                                 const ConvOptions& options);

/// Whether x lies channels last, so that a new output should too.
bool is_channels_last(const Operand& x) noexcept;

}  // namespace xpuruntime

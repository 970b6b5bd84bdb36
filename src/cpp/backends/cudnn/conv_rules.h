// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cudnn {

/// What is known of the convolutions of cuDNN, and of their gradients, without it. Pure. Which
/// activations, layouts and alignments go together is cuDNN's to say, when a kernel is prepared.
Support check_conv(const OpDesc& op, const DeviceInfo& device);

using Strides4 = std::array<std::int64_t, 4>;

/// The strides to tell cuDNN, which reads the layout from them: where dimensions of size 1 leave it
/// open, that of the other operands, and channels last where all leave it open. Of a gradient too:
/// x, weight and out are what `conv_slots` says.
struct ConvStrides {
  Strides4 x{}, weight{}, out{};
};
ConvStrides conv_strides(const OpDesc& op) noexcept;

}  // namespace xpuruntime::cudnn

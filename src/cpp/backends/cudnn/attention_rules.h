// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cudnn {

/// What is known of "cudnn.sdpa" without cuDNN, for attention and its backward. Pure. A version
/// of cuDNN may serve less; that shows when a kernel is prepared.
Support check_attention(const OpDesc& op, const DeviceInfo& device);

}  // namespace xpuruntime::cudnn

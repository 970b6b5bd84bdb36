// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "addon_abi.h"

namespace xpuruntime::bindings {

/// The functions of the addon that is built with PyTorch's headers; null where it is not in use.
/// Needs no GIL.
const torch_abi::AddonFunctions* addon() noexcept;

}  // namespace xpuruntime::bindings

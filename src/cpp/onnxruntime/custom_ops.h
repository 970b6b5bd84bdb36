// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "api.h"

/// Makes xpuruntime kernels operators of ONNX Runtime, in the domain `xpuruntime`: what
/// `SessionOptions.register_custom_ops_library(path of this module)` calls. One operator for each
/// execution provider that we have kernels for: CPU, and CUDA where the core has it.
///
/// A node carries the name of its rules (see NamedRules) and its own name in the model of the user.
/// Returns a status when the library is too old. Thread-safe. Nothing of ONNX Runtime is linked:
/// all functions come from `base`.
extern "C" __attribute__((visibility("default"), used)) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base);

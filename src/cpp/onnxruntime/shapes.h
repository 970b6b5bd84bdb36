// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "operation.h"

namespace xpuruntime::ort {

/// Gives ONNX Runtime the type and shape of a node's output, as far as they follow from its inputs.
/// A dimension that cannot be known gets a name of its own, from the node's: ONNX Runtime takes
/// dimensions of one name for equal. Throws InputError for a wrong attribute.
void infer_shape(const OrtApi& api, const OpSpec& spec, OrtShapeInferContext* context);

}  // namespace xpuruntime::ort

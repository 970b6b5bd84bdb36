// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>

#include "xpuruntime/dtype.h"

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>
#undef ORT_API_MANUAL_INIT

namespace xpuruntime::ort {

/// The version of ONNX Runtime's C interface that is asked for. Every later library serves it.
inline constexpr std::uint32_t kApiVersion = 21;

/// Throws UnsupportedOperationError with the message of a status that is not null, and releases it.
void check(const OrtApi& api, OrtStatus* status);
/// For functions that ONNX Runtime calls: inside `catch (...)`, the exception as a status. `where`,
/// when it is not empty, goes before the message.
OrtStatus* current_status(const OrtApi& api, const std::string& where = {}) noexcept;

/// Of a tensor's elements; bits 0 for what has no whole bytes or is text.
DType to_dtype(ONNXTensorElementDataType type) noexcept;

}  // namespace xpuruntime::ort

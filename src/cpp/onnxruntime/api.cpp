// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "api.h"

#include <exception>
#include <new>

#include "xpuruntime/error.h"

namespace xpuruntime::ort {

void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw UnsupportedOperationError("ONNX Runtime refused: " + message);
}

OrtStatus* current_status(const OrtApi& api, const std::string& where) noexcept {
  const auto made = [&](OrtErrorCode code, const char* message) {
    try {
      return api.CreateStatus(code, (where.empty() ? message : where + ": " + message).c_str());
    } catch (...) {
      return api.CreateStatus(code, message);
    }
  };
  try {
    throw;
  } catch (const InputError& error) {
    return made(ORT_INVALID_ARGUMENT, error.what());
  } catch (const UnsupportedOperationError& error) {
    return made(ORT_NOT_IMPLEMENTED, error.what());
  } catch (const std::bad_alloc&) {
    return made(ORT_FAIL, "there is no host memory left");
  } catch (const std::exception& error) {
    return made(ORT_FAIL, error.what());
  } catch (...) {
    return made(ORT_FAIL, "a kernel ended with an exception that is no std::exception");
  }
}

DType to_dtype(ONNXTensorElementDataType type) noexcept {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return {2, 32, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return {2, 16, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return {4, 16, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return {2, 64, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return {6, 8, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return {0, 8, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16:
      return {0, 16, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return {0, 32, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return {0, 64, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return {1, 8, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16:
      return {1, 16, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32:
      return {1, 32, 1};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64:
      return {1, 64, 1};
    default:
      return {};
  }
}

}  // namespace xpuruntime::ort

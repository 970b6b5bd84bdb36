// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/tensor_rules.h"

namespace xpuruntime::cudnn {

bool is_half(DType dtype) noexcept { return dtype == DType{2, 16, 1} || dtype == DType{4, 16, 1}; }

bool is_single(DType dtype) noexcept { return dtype == DType{2, 32, 1}; }

bool has_elements(const TensorDesc& tensor) noexcept {
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 1) return false;
  }
  return true;
}

bool has_positive_strides(const TensorDesc& tensor) noexcept {
  for (std::size_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] < 1) return false;
  }
  return true;
}

bool is_packed(const TensorDesc& tensor) noexcept {
  std::int64_t expected = 1;
  for (std::size_t i = tensor.rank; i-- > 0;) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

std::int64_t alignment_of(const TensorDesc& tensor) noexcept {
  return std::int64_t{1} << tensor.alignment;
}

std::size_t span_bytes(const TensorDesc& tensor) noexcept {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < tensor.rank; ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
  return static_cast<std::size_t>(last + 1) * tensor.dtype.itemsize();
}

std::string strides_of(const OpDesc& op, std::size_t slot) {
  std::string text = "the strides of '" + std::string(slot_name(op.kind, slot)) + "' are [";
  for (std::size_t i = 0; i < op[slot].rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(op[slot].strides[i]);
  }
  return text + "]";
}

}  // namespace xpuruntime::cudnn

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// What tells a tensor from others, as kernels are chosen by it. Shape and strides are the tensor's
/// own.
struct TensorTraits {
  std::int64_t rank = 0;
  const std::int64_t* sizes = nullptr;
  const std::int64_t* strides = nullptr;
  std::int32_t dtype = 0;
  /// Type and index, a byte of each: -1 is 255.
  std::uint8_t device = 0;
  std::uint8_t index = 0;
  /// The address modulo 16; of a tensor without elements, anything.
  std::uint8_t alignment = 0;
};

/// The c10::TensorImpl behind a tensor. Needs no GIL.
const char* object_of(TorchTensor tensor) noexcept;

/// Finds where PyTorch's tensors have their traits, by comparing some with what Python says of
/// them. `plain_keys`: the dispatch keys of tensors that are nothing but tensors, as PyTorch's
/// bits. Once. Returns what is against it, or nothing. With the GIL, after open_torch_shim().
std::string open_tensor_layout(std::uint64_t plain_keys);

/// Whether a tensor is nothing but a tensor: no subclass that looks on, no symbol for a size,
/// nothing that is nested or wrapped. False before open_tensor_layout(). Needs no GIL.
bool is_plain(TorchTensor tensor) noexcept;

/// The traits of a tensor by PyTorch's functions, one for each. False where these do not say them.
/// Needs no GIL.
bool ask_for_traits(const TorchShim& torch, TorchTensor tensor, TensorTraits& traits) noexcept;

/// The same; of a plain tensor they are read where they lie.
bool read_traits(const TorchShim& torch, TorchTensor tensor, TensorTraits& traits) noexcept;

}  // namespace xpuruntime::bindings

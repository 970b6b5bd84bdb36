// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "xpuruntime/dtype.h"

namespace xpuruntime::bindings {

/// An at::Tensor, as PyTorch's C functions take it.
using TorchTensor = void*;
/// One argument of an operator, as PyTorch's C functions give it to a kernel.
using TorchValue = std::uint64_t;
using TorchKernel = void (*)(TorchValue*, std::uint64_t, std::uint64_t);
/// Of a function: 0 where it did what was asked.
using TorchStatus = std::int32_t;

/// PyTorch's C functions, as far as the loaded one has them: nothing here is linked against it or
/// built with its headers. What has no stable function is tried out when it is opened.
struct TorchShim {
  TorchStatus (*dim)(TorchTensor, std::int64_t*);
  TorchStatus (*sizes)(TorchTensor, std::int64_t**);
  TorchStatus (*strides)(TorchTensor, std::int64_t**);
  TorchStatus (*dtype)(TorchTensor, std::int32_t*);
  TorchStatus (*device_type)(TorchTensor, std::int32_t*);
  TorchStatus (*device_index)(TorchTensor, std::int32_t*);
  TorchStatus (*data)(TorchTensor, const void**);
  TorchStatus (*empty)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                       std::int32_t, std::int32_t, TorchTensor*);
  TorchStatus (*copy_handle)(TorchTensor, TorchTensor*);
  TorchStatus (*drop)(TorchTensor);
  TorchStatus (*open_library)(const char*, const char*, const char*, std::uint32_t, void**);
  TorchStatus (*implement)(void*, const char*, TorchKernel, std::uint64_t);
  TorchStatus (*close_library)(void*);
  /// A new reference to the tensor's one Python object. With the GIL.
  PyObject* (*wrap)(const void*);
  /// torch.Tensor.
  PyTypeObject* type;
  /// Where a Python object of PyTorch's has its at::Tensor.
  std::size_t offset;

  TorchTensor tensor_of(PyObject* object) const noexcept {
    return reinterpret_cast<char*>(object) + offset;
  }
};

/// The functions, or null before they are opened, and where something lacks.
const TorchShim* torch_shim() noexcept;

/// Opens PyTorch's functions once, where the process has imported it, and tries them on tensors of
/// several classes. Returns what is against using them, or nothing. With the GIL.
std::string open_torch_shim();

/// A new tensor of PyTorch's own, as its allocator makes it, like an object of a class of its; none
/// where it is no such object, or the functions or a name of the type lack. With the GIL.
pybind11::object make_torch_tensor(PyObject* like, std::span<const std::int64_t> shape,
                                   std::span<const std::int64_t> strides, DType dtype);

/// A function of a library that the process has loaded, or null.
void* find_loaded(const char* library, const char* function) noexcept;

}  // namespace xpuruntime::bindings

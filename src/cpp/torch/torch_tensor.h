// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>

#include "xpuruntime/dtype.h"

namespace xpuruntime::bindings {

/// A new tensor of PyTorch's own, as its allocator makes it, on the device of another one, and
/// where its memory is; nothing where `like` is no torch.Tensor, or PyTorch has no such type. With
/// the GIL. Throws py::error_already_set.
pybind11::object make_torch_tensor(PyObject* like, std::span<const std::int64_t> shape,
                                   std::span<const std::int64_t> strides, DType dtype, void** data);

}  // namespace xpuruntime::bindings

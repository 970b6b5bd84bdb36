// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "device_argument.h"
#include "gil.h"
#include "python_memory.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/tensor.h"
#include "xpuruntime/types.h"

namespace xpuruntime::bindings {

/// Gives a Python reference back, on any thread, also while the interpreter ends (then it is left
/// alone).
inline void release_object(void* object) noexcept {
  if (Py_IsInitialized() == 0) return;
  const AcquireGil locked;
  Py_DECREF(static_cast<PyObject*>(object));
}

/// A stream for work on `device`: of xpuruntime, or of another library, which is wrapped and kept.
/// Nothing for None. Throws InputError for anything else.
inline std::optional<Stream> stream_argument(pybind11::handle value, DeviceId device) {
  if (value.is_none()) return std::nullopt;
  if (pybind11::isinstance<Stream>(value)) return value.cast<const Stream&>();
  const StreamHandle handle = to_stream(value.ptr());
  return Stream::wrap(device, handle, std::shared_ptr<void>(value.inc_ref().ptr(), release_object));
}

/// Frees a tensor. Without the GIL where giving its memory back may block.
struct TensorDeleter {
  void operator()(Tensor* tensor) const {
    if (tensor->is_last_owner() && tensor->storage().release_may_wait()) {
      const ReleaseGil unlocked;
      delete tensor;
    } else {
      delete tensor;
    }
  }
};

// What bind_tensor.cpp adds to the class, by protocol.
using TensorClass = pybind11::class_<Tensor, std::unique_ptr<Tensor, TensorDeleter>>;
void bind_tensor_dlpack(TensorClass& tensor);
void bind_tensor_numpy(TensorClass& tensor);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include "xpuruntime/tensor.h"
#include "xpuruntime/types.h"

namespace xpuruntime::bindings {

/// "cuda:0", or any object whose str() is such a name: a Device of ours, a torch.device.
inline DeviceId to_device(const pybind11::object& value) {
  return parse_device(std::string(pybind11::str(value)));
}

/// Gives a Python reference back, on any thread, also while the interpreter ends (then it is left
/// alone).
inline void release_object(void* object) noexcept {
  if (Py_IsInitialized() == 0) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(object));
  PyGILState_Release(state);
}

/// Frees a tensor. Without the GIL where giving its memory back may block.
struct TensorDeleter {
  void operator()(Tensor* tensor) const {
    if (tensor->is_last_owner() && tensor->storage().release_may_wait()) {
      const pybind11::gil_scoped_release unlocked;
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

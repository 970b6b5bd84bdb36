// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

namespace xpuruntime::bindings {

// One function a noun. Each adds its classes and functions to the module and decides nothing.

/// C++ errors become the classes of xpuruntime.errors. Called first.
void bind_errors();
void bind_addon(pybind11::module_& module);
void bind_allocator(pybind11::module_& module);
void bind_array_view(pybind11::module_& module);
void bind_build(pybind11::module_& module);
void bind_call_key(pybind11::module_& module);
void bind_guard(pybind11::module_& module);
void bind_copy(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_interruption(pybind11::module_& module);
void bind_onnxruntime(pybind11::module_& module);
void bind_profiler(pybind11::module_& module);
void bind_sdp_backend_scope(pybind11::module_& module);
void bind_sockets(pybind11::module_& module);
void bind_stable_product(pybind11::module_& module);
void bind_stream(pybind11::module_& module);
void bind_tensor(pybind11::module_& module);

/// What Python raised to end the work and not to report a failure, such as KeyboardInterrupt. No
/// std::exception, so that nothing between takes it for the failure of one kernel.
class Interruption {
 public:
  explicit Interruption(const pybind11::error_already_set& error) : error_(error) {}
  /// With the GIL.
  void restore() { error_.restore(); }

 private:
  pybind11::error_already_set error_;
};

/// For code outside pybind11's dispatch: call inside `catch (...)`; sets the Python error.
void set_python_error() noexcept;

}  // namespace xpuruntime::bindings

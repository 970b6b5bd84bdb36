// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "bind.h"

namespace {

// The GIL of another interpreter is not that of the main one, and much of what is kept here is one
// for the process: pybind11's types, and what PyGILState_Ensure gives.
bool is_main_interpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

}  // namespace

PYBIND11_MODULE(_core_in_main, module) {
  using namespace xpuruntime::bindings;
  module.doc() = "The C++ core of xpuruntime.";
  module.attr("__version__") = XPURUNTIME_VERSION;
  bind_errors();
  bind_build(module);
  bind_device(module);
  bind_memory(module);
  bind_stream(module);
  bind_tensor(module);
  bind_array_view(module);
  bind_copy(module);
  bind_kernels(module);
  bind_ops(module);
  bind_call_key(module);
  bind_guard(module);
  bind_interruption(module);
  bind_sockets(module);
  bind_sdp_backend_scope(module);
  bind_stable_product(module);
  bind_addon(module);
  bind_allocator(module);
  bind_onnxruntime(module);
  bind_profiler(module);
  // A name that the core lacks may have another one, which the error states (PEP 562).
  module.attr("__getattr__") = pybind11::cpp_function([](const pybind11::object& name) {
    return pybind11::module_::import("xpuruntime.lazy_names")
        .attr("load_name")("xpuruntime._core", name, pybind11::dict());
  });
}

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python looks up
extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  if (!is_main_interpreter()) {
    PyErr_SetString(
        PyExc_ImportError,
        "xpuruntime._core works in the main interpreter of a process only, and this is a "
        "subinterpreter. Fix: import it in the main one, or use a process of its own "
        "(mod_wsgi: WSGIApplicationGroup %{GLOBAL})");
    return nullptr;
  }
  return PyInit__core_in_main();
}

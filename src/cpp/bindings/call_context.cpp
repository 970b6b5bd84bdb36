// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_context.h"

#include <utility>

namespace py = pybind11;

namespace xpuruntime::bindings {

const CallContext& call_context(PyObject* object) {
  static PyObject* last = nullptr;
  static const CallContext* context = nullptr;
  if (context != nullptr && object == last) return *context;
  if (!py::isinstance<CallContext>(object)) {
    throw py::type_error("the first argument is " +
                         std::string(py::str(py::type::handle_of(object).attr("__qualname__"))) +
                         "; expected a CallContext, such as one of xpuruntime.ops.call_context");
  }
  const auto* found = py::handle(object).cast<const CallContext*>();
  context = found;
  Py_INCREF(object);
  Py_XDECREF(std::exchange(last, object));  // may call others, which remember their own
  return *found;
}

void bind_call_context(py::module_& module) {
  py::class_<CallContext>(module, "CallContext",
                          "Where a call stands: the site of its policy, and what the policy says.")
      .def(py::init([](const py::object& site, bool allow_tf32, bool deterministic,
                       bool below_autograd) {
             return CallContext{site, &site.cast<CallSite&>(), allow_tf32, deterministic,
                                below_autograd};
           }),
           py::arg("site"), py::kw_only(), py::arg("allow_tf32"), py::arg("deterministic"),
           py::arg("below_autograd") = false)
      .def_readonly("site", &CallContext::site_object)
      .def_readonly("allow_tf32", &CallContext::allow_tf32)
      .def_readonly("deterministic", &CallContext::deterministic)
      .def_readonly("below_autograd", &CallContext::below_autograd);
}

}  // namespace xpuruntime::bindings

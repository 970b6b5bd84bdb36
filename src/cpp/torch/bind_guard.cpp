// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "annotated_call.h"
#include "bind.h"
#include "call_module.h"
#include "call_phase.h"
#include "guard_state.h"
#include "node_modules.h"
#include "quick_product.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// (name, what looks at a call, the native kernel)
enum Part : std::uint8_t { kName, kSlow, kNative };

bool names_out(PyObject* names) {
  return PyTuple_GET_SIZE(names) == 1 &&
         PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "out") == 0;
}

PyObject* call_guard(PyObject* self, PyObject* const* values, Py_ssize_t count,
                     PyObject* names) noexcept {
  try {
    // Another thread may take the guard away while a kernel runs.
    const auto kept = py::reinterpret_borrow<py::object>(self);
    const auto size = static_cast<std::size_t>(count);
    const bool has_names = names != nullptr && PyTuple_GET_SIZE(names) > 0;
    if (count > 0 && (!has_names || names_out(names))) {
      PyObject* const out = has_names ? values[count] : nullptr;
      const std::span arrays(values + 1, size - 1);
      const Judgement found = judge(PyTuple_GET_ITEM(self, kName), arrays, out);
      if (found.verdict == Verdict::kQuick) {
        py::object made = quick_product(found.place.ptr(), arrays, out, found.phase);
        if (made) return made.release().ptr();
      } else if (found.verdict != Verdict::kAsk) {
        return call_native(PyTuple_GET_ITEM(self, kNative), values, size, names);
      }
    }
    return PyObject_Vectorcall(PyTuple_GET_ITEM(self, kSlow), values, size, names);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef method = {
    "guard", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_guard)),
    METH_FASTCALL | METH_KEYWORDS, "A product: calls its kernel, or asks Python which one."};

py::object make_guard(const py::str& name, const py::object& slow, const py::object& native) {
  const py::tuple self = py::make_tuple(name, slow, native);
  PyObject* const made = PyCFunction_New(&method, self.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

void bind_guard(py::module_& module) {
  module.def("make_guard", make_guard, py::arg("name"), py::arg("slow"), py::arg("native"),
             "What stands for a product; see xpuruntime.pytorch.dispatch.overrides.fast_kernels.");
  module.def("set_guards", set_guard_state, py::arg("routes"), py::arg("kinds"), py::kw_only(),
             py::arg("slow"), py::arg("phases"), py::arg("modules"),
             "Say what holds for all guards.");
  module.def(
      "call_phase",
      [] { return py::reinterpret_borrow<py::str>(phase_text(call_phase_with_gil())); },
      "The phase of the call that runs in this thread.");
  module.def(
      "set_generation_phase",
      [](std::string_view phase) {
        return py::reinterpret_borrow<py::str>(phase_text(set_generation_phase(phase_of(phase))));
      },
      py::arg("phase"), "Say what inference in this thread is from now on; returns the former.");
  module.def("node_thread", node_thread,
             "The number that nodes of autograd made in this thread have, and no others.");
  module.def(
      "enter_function",
      [](std::string_view phase, std::int64_t backward) {
        enter_function(phase_of(phase), backward);
      },
      py::arg("phase"), py::arg("backward"), "The forward of an autograd.Function begins.");
  module.def("leave_function", leave_function, "It ends.");
  module.def(
      "enter_module", enter_module, py::arg("path"), py::arg("module") = py::none(),
      "The forward of a module begins in this thread, inside of what called the function that "
      "calls this. It has ended when that has, also where nobody says so.");
  module.def("leave_module", leave_module, py::arg("module") = py::none(),
             "The forward of a module ends in this thread.");
  module.def("running_modules", running_modules, "How many modules run in this thread.");
  module.def(
      "outer_module", outer_module,
      "The path of the module around the one whose hook asks, before `enter_module`; or None.");
  module.def("running_module", running_module,
             "The path of the innermost module that runs in this thread, or None.");
  module.def("call_module", call_module_path, py::arg("recorded") = py::none(),
             "The path of the module that the call that runs in this thread belongs to.");
  module.def(
      "enter_call",
      [](std::string_view phase, const std::optional<py::str>& path, std::string_view graph) {
        const ModuleNumber within = path ? compiled_module(*path, graph_of(graph)) : kNoModule;
        enter_call({phase_of(phase), within});
      },
      py::arg("phase"), py::arg("path"), py::arg("graph"),
      "A call begins whose phase and module are stated.");
  module.def("leave_call", leave_call, "It ends.");
  module.def("forget_native_calls", forget_native_calls,
             "Have guards look anew which calls are native.");
}

}  // namespace xpuruntime::bindings

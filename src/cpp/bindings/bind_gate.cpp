// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstdint>
#include <string>

#include "bind.h"
#include "call_key.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// What holds for all gates. Read and written with the GIL.
struct State {
  PyObject* routes = nullptr;  // a dict from call keys to routes, or nothing: no policy holds
  bool slow = false;           // every call is to be looked at by Python
};

State& state() {
  static State instance;
  return instance;
}

PyObject* interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw py::error_already_set();
  return made;
}

// (name, what looks at a call, the native kernel)
enum Part : std::uint8_t { kName, kSlow, kNative };

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* const found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

// Whether the native kernel is known to serve this call: there is no policy, or its route says so.
bool passes(PyObject* name, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const State& now = state();
  if (now.slow) return false;
  if (now.routes == nullptr) return true;
  static PyObject* const place = interned("place");
  PyObject* last = nullptr;
  if (names != nullptr && PyTuple_GET_SIZE(names) > 0) {
    if (PyTuple_GET_SIZE(names) > 1 ||
        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "out") != 0) {
      return false;
    }
    last = values[count];
  }
  const py::object routes = py::reinterpret_borrow<py::object>(now.routes);
  const py::object key = call_key_of(name, values + 1, count - 1, last);
  PyObject* const found = PyDict_GetItemWithError(routes.ptr(), key.ptr());
  if (found == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return false;
  }
  return attribute(py::reinterpret_borrow<py::object>(found).ptr(), place).is_none();
}

bool is_invalidated() {
  if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) return false;
  py::error_already_set error;  // takes it
  const std::string text = py::str(error.value());
  if (text.find("has been invalidated") != std::string::npos) return true;
  error.restore();
  return false;
}

PyObject* call_gate(PyObject* self, PyObject* const* values, Py_ssize_t count,
                    PyObject* names) noexcept {
  try {
    const auto size = static_cast<std::size_t>(count);
    PyObject* const native = PyTuple_GET_ITEM(self, kNative);
    if (count < 1 || !passes(PyTuple_GET_ITEM(self, kName), values, count, names)) {
      return PyObject_Vectorcall(PyTuple_GET_ITEM(self, kSlow), values, size, names);
    }
    static PyObject* const call = interned("call");
    PyObject* const done = PyObject_Vectorcall(attribute(native, call).ptr(), values, size, names);
    // Where another library's kernel was taken away meanwhile, the object knows what is there now.
    if (done == nullptr && is_invalidated()) {
      return PyObject_Vectorcall(native, values, size, names);
    }
    return done;
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef method = {"gate",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_gate)),
                      METH_FASTCALL | METH_KEYWORDS,
                      "An operator: calls its native kernel, or asks Python which one."};

py::object make_gate(const py::str& name, const py::object& slow, const py::object& native) {
  const py::tuple self = py::make_tuple(name, slow, native);
  PyObject* const made = PyCFunction_New(&method, self.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

void set_gates(const py::object& routes, bool slow) {
  State& now = state();
  now.slow = slow;
  PyObject* const before = now.routes;
  now.routes = routes.is_none() ? nullptr : py::dict(routes).inc_ref().ptr();
  Py_XDECREF(before);
}

}  // namespace

void bind_gate(py::module_& module) {
  module.def("make_gate", make_gate, py::arg("name"), py::arg("slow"), py::arg("native"),
             "What stands for an operator; see xpuruntime.pytorch.overriding.gates.");
  module.def("set_gates", set_gates, py::arg("routes"), py::arg("slow"),
             "Say what holds for all gates.");
}

}  // namespace xpuruntime::bindings

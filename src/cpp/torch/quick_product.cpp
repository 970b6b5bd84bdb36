// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "quick_product.h"

#include <array>

#include "call_context.h"
#include "python_names.h"

namespace py = pybind11;

namespace xpuruntime::bindings {

py::object quick_product(PyObject* place, std::span<PyObject* const> arrays, PyObject* out,
                         PyObject* phase) {
  static PyObject* const op = imported("xpuruntime._core", "op_matmul");
  static PyObject* const is_deterministic = private_api("is_deterministic");
  // The switch may change between two calls.
  const bool deterministic = called(is_deterministic).ptr() == Py_True;
  if (call_context(place).deterministic != deterministic) return {};
  PyObject* const addend = arrays.size() == 3 ? arrays[0] : Py_None;
  const auto matrices = arrays.last(2);
  // place, a, b, bias, scale_a, scale_b, out, activation, out_dtype, phase, stream
  const std::array<PyObject*, 11> all = {
      place,   matrices[0], matrices[1], addend, Py_None, Py_None, out == nullptr ? Py_None : out,
      Py_None, Py_None,     phase,       Py_None};
  auto made =
      py::reinterpret_steal<py::object>(PyObject_Vectorcall(op, all.data(), all.size(), nullptr));
  if (!made) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return made;
}

}  // namespace xpuruntime::bindings

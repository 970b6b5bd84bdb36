// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operator_kind.h"

#include <vector>

namespace py = pybind11;

namespace xpuruntime::bindings {

std::span<const OperatorKind> operator_kinds() {
  static const std::vector<OperatorKind> all = [] {
    const auto norms = norm_kinds();
    std::vector<OperatorKind> made(norms.begin(), norms.end());
    made.push_back(sdpa_kind());
    return made;
  }();
  return all;
}

const OperatorKind* find_operator_kind(std::string_view name) {
  for (const OperatorKind& kind : operator_kinds()) {
    if (kind.signature.name == name) return &kind;
  }
  return nullptr;
}

py::object call_core(PyObject* function, std::span<PyObject* const> values) {
  auto done = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(function, values.data(), values.size(), nullptr));
  if (done) return done;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  PyErr_Clear();
  return {};
}

}  // namespace xpuruntime::bindings

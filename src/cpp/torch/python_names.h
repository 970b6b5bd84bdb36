// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

namespace xpuruntime::bindings {

// What Python has by a name, for variables that are never dropped. With the GIL.

/// The text itself.
inline PyObject* interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw pybind11::error_already_set();
  return made;
}

/// A function or a value of a module.
inline PyObject* imported(const char* module, const char* name) {
  return pybind11::object(pybind11::module_::import(module).attr(name)).release().ptr();
}

/// One that PyTorch keeps to itself.
inline PyObject* private_api(const char* name) {
  return imported("xpuruntime.pytorch._private_api", name);
}

/// What a function without arguments returns. With the GIL.
inline pybind11::object called(PyObject* function) {
  PyObject* const found = PyObject_CallNoArgs(function);
  if (found == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(found);
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace xpuruntime::bindings {

// The text of a Python exception. That of a caller's own class may raise, or be no text: then it is
// empty. Needs the GIL.
inline std::string error_message(const pybind11::error_already_set& error) {
  PyObject* const text = PyObject_Str(error.value().ptr());
  if (text == nullptr) {
    PyErr_Clear();
    return "";
  }
  const auto owned = pybind11::reinterpret_steal<pybind11::object>(text);
  const char* const utf8 = PyUnicode_AsUTF8(text);
  if (utf8 == nullptr) PyErr_Clear();  // lone surrogates
  return utf8 == nullptr ? "" : utf8;
}

// The name of its class and its text.
inline std::string error_text(const pybind11::error_already_set& error) {
  const std::string name = reinterpret_cast<PyTypeObject*>(error.type().ptr())->tp_name;
  const std::string message = error_message(error);
  const std::string kind = name.substr(name.rfind('.') + 1);
  return message.empty() ? kind : kind + ": " + message;
}

}  // namespace xpuruntime::bindings

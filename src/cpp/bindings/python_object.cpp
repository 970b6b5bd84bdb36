// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "python_object.h"

#include "gil.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {

bool is_interruption(const py::error_already_set& error) { return !error.matches(PyExc_Exception); }

void raise_later(const py::error_already_set& error) noexcept {
  if (is_interruption(error)) {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error.type().ptr());
  }
}

std::string current_reason() {
  try {
    throw;
  }
  XPURUNTIME_STOP_IF_UNWOUND
  catch (const py::error_already_set& error) {
    try {
      return std::string(py::str(error.type().attr("__name__"))) + ": " +
             std::string(py::str(error.value()));
    } catch (const py::error_already_set& other) {
      raise_later(other);
      return "an error that cannot be shown";
    } catch (...) {
      stop_if_unwound();
      return "an error that cannot be shown";
    }
  }
  catch (const std::exception& error) {
    return error.what();
  }
  catch (...) {
    return "an unknown error";
  }
}

void require_callable(const py::object& object, const char* name, const char* what) {
  if (PyCallable_Check(py::object(py::getattr(object, name, py::none())).ptr()) != 0) return;
  throw InputError("the " + std::string(what) + " " + std::string(py::str(py::repr(object))) +
                   " has no method '" + name + "'");
}

}  // namespace xpuruntime::bindings

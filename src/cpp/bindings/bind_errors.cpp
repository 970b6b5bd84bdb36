// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstddef>
#include <new>
#include <string>

#include "bind.h"
#include "gil.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// The classes live in Python and are looked up when first needed: importing the core imports
// nothing else.
void raise(const char* name, const std::string& message, const std::string& device,
           py::object status = py::none(),
           const UnsupportedOperationError::Candidates& candidates = {}) {
  try {
    const py::object type = py::module_::import("xpuruntime.errors").attr(name);
    const py::object value =
        type(message, py::arg("device") = device.empty() ? py::object(py::none()) : py::str(device),
             py::arg("status") = status);
    if (!candidates.empty()) {
      py::tuple pairs(candidates.size());
      for (std::size_t i = 0; i < candidates.size(); ++i) {
        pairs[i] = py::make_tuple(candidates[i].first, candidates[i].second);
      }
      value.attr("candidates") = pairs;
    }
    PyErr_SetObject(type.ptr(), value.ptr());
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

bool translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (Interruption& error) {
    error.restore();
  } catch (const OutOfMemoryError& error) {
    raise("OutOfMemoryError", error.what(), error.device());
  } catch (const CudaError& error) {
    raise("CudaError", error.what(), error.device(), py::int_(error.status()));
  } catch (const UnsupportedOperationError& error) {
    raise("UnsupportedOperationError", error.what(), error.device(), py::none(),
          error.candidates());
  } catch (const InputError& error) {
    raise("InputError", error.what(), error.device());
  } catch (const Error& error) {
    raise("XpuRuntimeError", error.what(), error.device());
  } catch (const std::bad_alloc&) {
    raise("OutOfMemoryError", "the process is out of host memory: free some, or ask for less",
          "cpu");
  } catch (...) {
    return false;
  }
  return true;
}

}  // namespace

void bind_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    if (pointer && !translate(pointer)) std::rethrow_exception(pointer);
  });
}

void set_python_error() noexcept {
  stop_if_unwound();
  const std::exception_ptr pointer = std::current_exception();
  if (translate(pointer)) return;
  try {
    std::rethrow_exception(pointer);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
  }
}

}  // namespace xpuruntime::bindings

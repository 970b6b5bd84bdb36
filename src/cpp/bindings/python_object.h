// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "convert.h"

namespace xpuruntime::bindings {

/// A Python object that may be dropped on any thread.
class Kept {
 public:
  explicit Kept(const pybind11::object& object) : object_(object.inc_ref().ptr(), release_object) {}
  pybind11::handle get() const noexcept { return object_.get(); }

 private:
  std::shared_ptr<PyObject> object_;
};

bool is_interruption(const pybind11::error_already_set& error);

/// Raises an interruption that cannot be raised where it came as soon as Python goes on in this
/// thread. To be called last, since whatever asks Python would raise it.
void raise_later(const pybind11::error_already_set& error) noexcept;

/// What is being thrown, as one line. Call inside `catch (...)`, with the GIL.
std::string current_reason();

/// Throws InputError where an object, a `what`, has no method of this name.
void require_callable(const pybind11::object& object, const char* name, const char* what);

}  // namespace xpuruntime::bindings

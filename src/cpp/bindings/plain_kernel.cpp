// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "plain_kernel.h"

#include <utility>

namespace py = pybind11;

namespace xpuruntime::bindings {

py::object NativeKernel::place(const std::string& name, const std::string& key,
                               const TorchFunctions& native, const TorchFunctions& over,
                               const py::object& below) {
  const TorchFunctions beneath = find_functions(name, key);
  functor_ = native.functor;
  plain_ = native.plain;
  boxed_functor_ = beneath.functor;
  boxed_ = beneath.boxed;
  try {
    return removal(place_functions(name, key, over), below);
  } catch (...) {
    below();
    throw;
  }
}

py::object removal(std::function<void()> remove, py::object below) {
  return py::cpp_function(
      [remove = std::move(remove), below = std::move(below), done = false]() mutable {
        if (std::exchange(done, true)) return;
        remove();
        below();
      });
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "xpuruntime/error.h"
#include "xpuruntime/types.h"

namespace xpuruntime::bindings {

/// A device as Python names it: an integer N is "cuda:N"; anything else is taken by its str().
/// Throws InputError.
inline DeviceId device_argument(const pybind11::object& value) {
  if (PyBool_Check(value.ptr()) == 0 && PyLong_Check(value.ptr()) != 0) {
    const long index = PyLong_AsLong(value.ptr());
    if (index == static_cast<long>(static_cast<int>(index)) && PyErr_Occurred() == nullptr) {
      return {DeviceType::kCuda, static_cast<int>(index)};
    }
    PyErr_Clear();
    throw InputError("device index " + std::string(pybind11::str(value)) + " is out of range");
  }
  return parse_device(std::string(pybind11::str(value)));
}

/// The same; nothing for None.
inline std::optional<DeviceId> optional_device(const pybind11::object& value) {
  if (value.is_none()) return std::nullopt;
  return device_argument(value);
}

}  // namespace xpuruntime::bindings

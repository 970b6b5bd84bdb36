// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "torch_tensor.h"

#include <dlpack/dlpack.h>

#include <array>
#include <string>

#include "addon_functions.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

PyObject* interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw py::error_already_set();
  return made;
}

PyObject* imported_torch() {
  static PyObject* found = nullptr;  // for as long as the process lives
  if (found != nullptr) return found;
  static PyObject* const name = interned("torch");
  static PyObject* const tensor = interned("Tensor");
  PyObject* const module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  // Not while it is being imported.
  if (module != nullptr && PyObject_HasAttr(module, tensor) == 1) {
    found = py::reinterpret_borrow<py::object>(module).release().ptr();
  }
  return found;
}

bool is_torch_tensor(PyObject* object, PyObject* torch) {
  static PyObject* const type = py::object(py::handle(torch).attr("Tensor")).release().ptr();
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type)) != 0;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* const found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::tuple sizes_of(std::span<const std::int64_t> values) {
  py::tuple made(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) made[i] = py::int_(values[i]);
  return made;
}

py::object make_in_python(PyObject* torch, PyObject* like, std::span<const std::int64_t> shape,
                          std::span<const std::int64_t> strides, const std::string& dtype,
                          void** data) {
  static PyObject* const make = py::object(py::handle(torch).attr("empty_strided")).release().ptr();
  static PyObject* const names = py::make_tuple("dtype", "device").release().ptr();
  static PyObject* const device = interned("device");
  static PyObject* const data_ptr = interned("data_ptr");
  const py::object type = py::getattr(torch, dtype.c_str(), py::none());
  if (type.is_none()) return {};
  const py::tuple size = sizes_of(shape);
  const py::tuple stride = sizes_of(strides);
  const py::object place = attribute(like, device);
  const std::array<PyObject*, 4> values = {size.ptr(), stride.ptr(), type.ptr(), place.ptr()};
  auto made = py::reinterpret_steal<py::object>(PyObject_Vectorcall(make, values.data(), 2, names));
  if (!made) throw py::error_already_set();
  const auto address =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(made.ptr(), data_ptr));
  if (!address) throw py::error_already_set();
  *data = PyLong_AsVoidPtr(address.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return made;
}

}  // namespace

py::object make_torch_tensor(PyObject* like, std::span<const std::int64_t> shape,
                             std::span<const std::int64_t> strides, DType dtype, void** data) {
  PyObject* const torch = imported_torch();
  if (torch == nullptr || !is_torch_tensor(like, torch)) return {};
  // The addon knows no types of 8 bits and less for floating-point numbers.
  const bool is_common = dtype.code != kDLFloat || dtype.bits >= 16;
  if (const auto* const functions = addon();
      functions != nullptr && is_common && dtype.code <= kDLBool) {
    auto made = py::reinterpret_steal<py::object>(functions->empty_like(
        like, shape.size(), shape.data(), strides.data(), dtype.code, dtype.bits, data));
    if (!made) throw py::error_already_set();
    return made;
  }
  return make_in_python(torch, like, shape, strides, std::string(to_string(dtype)), data);
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bind.h"
#include "call_key.h"
#include "exchange.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr std::size_t kMaxBytes = 512;
constexpr std::uintptr_t kAlignment = 16;

// Bytes that are filled from the front.
class KeyBytes {
 public:
  bool put(const void* data, std::size_t size) noexcept {
    if (size > kMaxBytes - size_) return false;
    std::memcpy(bytes_.data() + size_, data, size);
    size_ += size;
    return true;
  }
  template <typename T>
  bool put(T value) noexcept {
    return put(&value, sizeof value);
  }
  PyObject* object() const noexcept {
    return PyBytes_FromStringAndSize(bytes_.data(), static_cast<Py_ssize_t>(size_));
  }

 private:
  std::array<char, kMaxBytes> bytes_{};
  std::size_t size_ = 0;
};

bool put_array(KeyBytes& key, PyObject* object) {
  if (object == Py_None) return key.put(std::uint8_t{0xFF});
  const Exchange* const exchange = find_exchange(Py_TYPE(object));
  if (exchange == nullptr || exchange->api->dltensor_from_py_object_no_sync == nullptr) {
    return false;
  }
  DLTensor view;
  if (exchange->api->dltensor_from_py_object_no_sync(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data) + view.byte_offset;
  const std::array<std::uint8_t, 6> head = {static_cast<std::uint8_t>(view.ndim),
                                            static_cast<std::uint8_t>(view.device.device_type),
                                            static_cast<std::uint8_t>(view.device.device_id),
                                            view.dtype.code,
                                            view.dtype.bits,
                                            static_cast<std::uint8_t>(address & (kAlignment - 1))};
  const auto dims = static_cast<std::size_t>(view.ndim) * sizeof(std::int64_t);
  if (!key.put(head.data(), head.size()) || !key.put(view.shape, dims)) return false;
  return view.strides == nullptr || key.put(view.strides, dims);
}

PyObject* call_key(PyObject*, PyObject* const* values, Py_ssize_t count) noexcept {
  try {
    if (count < 1) throw py::type_error("call_key() takes a name, then arrays or None");
    return call_key_of(values[0], values + 1, count - 1).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef method = {"call_key",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_key)),
                      METH_FASTCALL, "Everything that a kernel depends on of a call's arrays."};

}  // namespace

py::object call_key_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count, PyObject* last) {
  Py_ssize_t length = 0;
  const char* const text =
      PyUnicode_Check(name) == 0 ? nullptr : PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw py::type_error("a key begins with a name");
  }
  KeyBytes key;
  bool whole = key.put(text, static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; whole && i < count; ++i) whole = put_array(key, arrays[i]);
  if (whole && last != nullptr) whole = put_array(key, last);
  if (!whole) return py::none();
  PyObject* const made = key.object();
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

void bind_call_key(py::module_& module) {
  module.attr(method.ml_name) =
      py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
}

}  // namespace xpuruntime::bindings

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

bool see_array(PyObject* object, DLTensor& view) {
  const Exchange* const exchange = find_exchange(Py_TYPE(object));
  if (exchange == nullptr || exchange->api->dltensor_from_py_object_no_sync == nullptr) {
    return false;
  }
  if (exchange->api->dltensor_from_py_object_no_sync(object, &view) == 0) return true;
  PyErr_Clear();
  return false;
}

bool put_array(KeyBytes& key, PyObject* object) {
  if (object == Py_None) return key.put(std::uint8_t{0xFF});
  DLTensor view;
  if (!see_array(object, view)) return false;
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

// Type, device, and how rows lie.
bool put_traits(KeyBytes& key, const DLTensor& view) {
  const bool in_rows = view.strides == nullptr || view.strides[view.ndim - 1] == 1;
  const std::array<std::uint8_t, 5> traits = {static_cast<std::uint8_t>(view.device.device_type),
                                              static_cast<std::uint8_t>(view.device.device_id),
                                              view.dtype.code, view.dtype.bits,
                                              static_cast<std::uint8_t>(in_rows ? 1 : 0)};
  return key.put(traits.data(), traits.size());
}

bool put_mask(KeyBytes& key, PyObject* object, std::int64_t queries, std::int64_t keys) {
  if (object == Py_None) return true;
  DLTensor view;
  if (!see_array(object, view) || view.ndim < 2 || !put_traits(key, view)) return false;
  const std::int64_t* const shape = view.shape;
  const bool of_lengths = shape[view.ndim - 2] == queries && shape[view.ndim - 1] == keys;
  const auto counts = static_cast<std::size_t>(view.ndim - (of_lengths ? 2 : 0));
  return key.put(static_cast<std::uint8_t>(of_lengths ? 1 : 0)) &&
         key.put(shape, counts * sizeof(std::int64_t));
}

// Of query, key and value in four dimensions, everything but the lengths.
bool put_attention(KeyBytes& key, PyObject* const* arrays, Py_ssize_t count) {
  if (count < 3 || count > 4) return false;
  std::array<std::int64_t, 3> lengths{};
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    DLTensor view;
    if (!see_array(arrays[i], view) || view.ndim != 4 || !put_traits(key, view)) return false;
    const std::array<std::int64_t, 3> sizes = {view.shape[0], view.shape[1], view.shape[3]};
    if (!key.put(sizes.data(), sizeof sizes)) return false;
    lengths[i] = view.shape[2];
  }
  const auto [queries, keys, values] = lengths;
  if (queries == 0 || keys == 0) return false;
  const std::array<std::uint8_t, 4> kinds = {queries == 1, keys == 1, queries == keys,
                                             keys == values};
  if (!key.put(kinds.data(), kinds.size())) return false;
  return count == 3 || put_mask(key, arrays[3], queries, keys);
}

template <py::object (*kMake)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* make_key(PyObject*, PyObject* const* values, Py_ssize_t count) noexcept {
  try {
    if (count < 1) throw py::type_error("a key is made of a name, then arrays or None");
    return kMake(values[0], values + 1, count - 1).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <py::object (*kMake)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction as_method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_key<kMake>));
}

py::object whole_key(PyObject* name, PyObject* const* arrays, Py_ssize_t count) {
  return call_key_of(name, arrays, count);
}

std::array<PyMethodDef, 2> methods = {{
    {"call_key", as_method<whole_key>(), METH_FASTCALL,
     "Everything that a kernel depends on of a call's arrays."},
    {"attention_kind", as_method<attention_kind_of>(), METH_FASTCALL,
     "What is left of a call of attention without its lengths, as a key; None where they count. A "
     "kernel that serves one call of a kind may refuse another."},
}};

bool put_name(KeyBytes& key, PyObject* name) {
  Py_ssize_t length = 0;
  const char* const text =
      PyUnicode_Check(name) == 0 ? nullptr : PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw py::type_error("a key begins with a name");
  }
  return key.put(text, static_cast<std::size_t>(length));
}

py::object object_of(const KeyBytes& key, bool whole) {
  if (!whole) return py::none();
  PyObject* const made = key.object();
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

py::object call_key_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count, PyObject* last) {
  KeyBytes key;
  bool whole = put_name(key, name);
  for (Py_ssize_t i = 0; whole && i < count; ++i) whole = put_array(key, arrays[i]);
  if (whole && last != nullptr) whole = put_array(key, last);
  return object_of(key, whole);
}

py::object attention_kind_of(PyObject* name, PyObject* const* arrays, Py_ssize_t count) {
  KeyBytes key;
  const bool whole = put_name(key, name) && put_attention(key, arrays, count);
  return object_of(key, whole);
}

void bind_call_key(py::module_& module) {
  for (PyMethodDef& method : methods) {
    module.attr(method.ml_name) =
        py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  }
}

}  // namespace xpuruntime::bindings

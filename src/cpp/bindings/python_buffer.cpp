// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <array>
#include <cstddef>
#include <new>
#include <string>
#include <utility>

#include "bind.h"
#include "gil.h"
#include "python_memory.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

struct BufferObject {
  PyObject_HEAD Buffer buffer;
};

PyTypeObject* buffer_type = nullptr;

// Objects to use again; the GIL guards them.
constexpr std::size_t kSpareObjects = 64;
std::array<PyObject*, kSpareObjects> spare_objects{};
std::size_t spare_count = 0;

Buffer& buffer_of(PyObject* self) noexcept { return reinterpret_cast<BufferObject*>(self)->buffer; }

void free_memory(Buffer& buffer) noexcept {
  if (buffer && buffer.pool()->free_may_wait()) {
    PyThreadState* const state = PyEval_SaveThread();
    buffer.reset();
    take_gil_back(state);
  } else {
    buffer.reset();
  }
}

void dealloc(PyObject* self) noexcept {
  Buffer& buffer = buffer_of(self);
  free_memory(buffer);
  PyTypeObject* const type = Py_TYPE(self);
  if (spare_count < kSpareObjects) {
    spare_objects[spare_count++] = self;
  } else {
    buffer.~Buffer();
    type->tp_free(self);
  }
  Py_DECREF(type);
}

std::string device_of(const Buffer& buffer) {
  return buffer.pool()->host_accessible() ? "cpu" : to_string(buffer.pool()->device());
}

PyObject* get_ptr(PyObject* self, void*) { return PyLong_FromVoidPtr(buffer_of(self).data()); }

PyObject* get_nbytes(PyObject* self, void*) { return PyLong_FromSize_t(buffer_of(self).size()); }

PyObject* get_device(PyObject* self, void*) {
  return PyUnicode_FromString(device_of(buffer_of(self)).c_str());
}

PyObject* get_stream(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(buffer_of(self).stream());
}

PyObject* record_stream(PyObject* self, PyObject* stream) {
  try {
    buffer_of(self).record_stream(to_stream(stream));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* repr(PyObject* self) {
  const Buffer& buffer = buffer_of(self);
  return PyUnicode_FromFormat("<Buffer of %zu bytes on %s at %p, from pool '%s'>", buffer.size(),
                              device_of(buffer).c_str(), buffer.data(),
                              buffer.pool()->name().c_str());
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Buffer& buffer = buffer_of(self);
  if (!buffer.pool()->host_accessible()) {
    view->obj = nullptr;
    PyErr_Format(PyExc_BufferError,
                 "the memory is on %s, which the host cannot read: copy it first",
                 device_of(buffer).c_str());
    return -1;
  }
  return PyBuffer_FillInfo(view, self, buffer.data(), static_cast<Py_ssize_t>(buffer.size()), 0,
                           flags);
}

PyGetSetDef attributes[] = {
    {"ptr", get_ptr, nullptr, "Address as an integer, aligned to 256 bytes.", nullptr},
    {"nbytes", get_nbytes, nullptr, "Size in bytes, as asked for.", nullptr},
    {"device", get_device, nullptr,
     "Where the memory is: 'cpu' (also for pinned memory) or 'cuda:N'.", nullptr},
    {"stream", get_stream, nullptr, "Handle of the stream in whose order the memory is used.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"record_stream", record_stream, METH_O,
     "record_stream($self, stream, /)\n--\n\nDeclare that work on another stream uses the "
     "memory.\n\nWhen "
     "the "
     "buffer is freed, its memory is not used again before that work is done."},
    {nullptr, nullptr, 0, nullptr},
};

constexpr const char* kDoc =
    "Memory from a pool; freed when the last reference goes.\n\nMemory that the host can read (CPU "
    "and "
    "pinned pools) also has the buffer protocol: ``memoryview(buffer)``.";

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_tp_getset, attributes},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {0, nullptr},
};

PyType_Spec spec = {
    "xpuruntime._core.Buffer",
    sizeof(BufferObject),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    slots,
};

}  // namespace

PyObject* new_buffer(Buffer buffer) noexcept {
  PyObject* self = nullptr;
  if (spare_count > 0) {
    self = PyObject_Init(spare_objects[--spare_count], buffer_type);
    buffer_of(self) = std::move(buffer);
    return self;
  }
  self = buffer_type->tp_alloc(buffer_type, 0);
  if (self != nullptr) new (&buffer_of(self)) Buffer(std::move(buffer));
  return self;
}

py::object to_python(Buffer buffer) {
  PyObject* const self = new_buffer(std::move(buffer));
  if (self == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(self);
}

void add_buffer_type(py::module_& module) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  buffer_type = reinterpret_cast<PyTypeObject*>(type);
  module.add_object("Buffer", type);
}

}  // namespace xpuruntime::bindings

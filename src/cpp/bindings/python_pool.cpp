// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstddef>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "bind.h"
#include "device_argument.h"
#include "gil.h"
#include "python_memory.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_manager.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

struct PoolObject {
  PyObject_HEAD std::shared_ptr<MemoryPool> pool;
};

PyTypeObject* pool_type = nullptr;

std::shared_ptr<MemoryPool>& pool_of(PyObject* self) noexcept {
  return reinterpret_cast<PoolObject*>(self)->pool;
}

// Runs `body`, turning C++ errors into Python's.
template <typename Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body().release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

std::size_t to_bytes(PyObject* object, const char* what) {
  const Py_ssize_t bytes = PyNumber_AsSsize_t(object, PyExc_OverflowError);
  if (bytes == -1 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw InputError(std::string(what) + " " + std::string(py::str(object)) +
                     " is no number of bytes that a computer can address");
  }
  if (bytes < 0) {
    throw InputError(std::string(what) + " " + std::to_string(bytes) +
                     " is negative: give a number of bytes");
  }
  return static_cast<std::size_t>(bytes);
}

std::optional<std::size_t> to_limit(PyObject* object) {
  if (object == nullptr || object == Py_None) return std::nullopt;
  const std::size_t limit = to_bytes(object, "limit");
  if (limit == 0) throw InputError("limit 0 leaves no memory: give a number of bytes, or None");
  return limit;
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&] {
    static const char* names[] = {"device", "kind", "limit", "name", nullptr};
    PyObject* device = nullptr;
    const char* kind = "caching";
    PyObject* limit = nullptr;
    const char* name = nullptr;
    if (PyArg_ParseTupleAndKeywords(args, kwargs, "|OsOz:MemoryPool", const_cast<char**>(names),
                                    &device, &kind, &limit, &name) == 0) {
      throw py::error_already_set();
    }
    const DeviceId id = device == nullptr
                            ? DeviceId{DeviceType::kCuda, 0}
                            : device_argument(py::reinterpret_borrow<py::object>(device));
    PoolOptions options{.name = name == nullptr ? "" : name, .limit = to_limit(limit)};
    std::shared_ptr<MemoryPool> pool;
    {
      const std::string kind_copy = kind;
      const ReleaseGil unlocked;
      pool = MemoryManager::instance().make_pool(id, kind_copy, std::move(options));
    }
    PyObject* const self = type->tp_alloc(type, 0);
    if (self == nullptr) throw py::error_already_set();
    new (&pool_of(self)) std::shared_ptr<MemoryPool>(std::move(pool));
    return py::reinterpret_steal<py::object>(self);
  });
}

void dealloc(PyObject* self) noexcept {
  PyTypeObject* const type = Py_TYPE(self);
  {
    // The last one out gives the memory back, which may wait for the device.
    PyThreadState* const state = PyEval_SaveThread();
    pool_of(self).~shared_ptr();
    take_gil_back(state);
  }
  type->tp_free(self);
  Py_DECREF(type);
}

// The hot path: what is at hand is given at once, with the GIL; everything else without it.
PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  try {
    PyObject* stream = nullptr;
    if (names != nullptr) {
      if (PyTuple_GET_SIZE(names) != 1 || count != 1 ||
          PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "stream") != 0) {
        PyErr_SetString(PyExc_TypeError, "allocate(nbytes, stream=None) takes these two arguments");
        return nullptr;
      }
      stream = args[1];
    } else if (count == 2) {
      stream = args[1];
    } else if (count != 1) {
      PyErr_SetString(PyExc_TypeError, "allocate(nbytes, stream=None) takes one or two arguments");
      return nullptr;
    }
    const std::size_t bytes = to_bytes(args[0], "size");
    const StreamHandle handle = stream == nullptr ? 0 : to_stream(stream);
    const std::shared_ptr<MemoryPool>& pool = pool_of(self);
    Buffer buffer = pool->try_allocate(bytes, handle);
    if (!buffer) {
      const ReleaseGil unlocked;
      buffer = pool->allocate(bytes, handle);
    }
    return new_buffer(std::move(buffer));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&] {
    MemoryStats now;
    {
      const ReleaseGil unlocked;
      now = pool_of(self)->stats();
    }
    return py::cast(now);
  });
}

PyObject* reset_peak(PyObject* self, PyObject*) {
  pool_of(self)->reset_peak();
  Py_RETURN_NONE;
}

PyObject* trim(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded([&] {
    static const char* names[] = {"keep", nullptr};
    PyObject* keep = nullptr;
    if (PyArg_ParseTupleAndKeywords(args, kwargs, "|O:trim", const_cast<char**>(names), &keep) ==
        0) {
      throw py::error_already_set();
    }
    const std::size_t bytes = keep == nullptr ? 0 : to_bytes(keep, "keep");
    std::size_t released = 0;
    {
      const ReleaseGil unlocked;
      released = pool_of(self)->trim(bytes);
    }
    return py::object(py::int_(released));
  });
}

PyObject* empty_cache(PyObject* self, PyObject*) {
  return guarded([&] {
    std::size_t released = 0;
    {
      const ReleaseGil unlocked;
      released = pool_of(self)->empty_cache();
    }
    return py::object(py::int_(released));
  });
}

PyObject* get_limit(PyObject* self, void*) {
  const auto limit = pool_of(self)->limit();
  if (!limit) Py_RETURN_NONE;
  return PyLong_FromSize_t(*limit);
}

int set_limit(PyObject* self, PyObject* value, void*) {
  try {
    if (value == nullptr) throw InputError("limit cannot be deleted: set it to None for no limit");
    const auto limit = to_limit(value);
    const ReleaseGil unlocked;
    pool_of(self)->set_limit(limit);
    return 0;
  } catch (...) {
    set_python_error();
    return -1;
  }
}

PyObject* get_device(PyObject* self, void*) {
  return PyUnicode_FromString(to_string(pool_of(self)->device()).c_str());
}

PyObject* get_kind(PyObject* self, void*) {
  return PyUnicode_FromString(std::string(pool_of(self)->kind()).c_str());
}

PyObject* get_name(PyObject* self, void*) {
  return PyUnicode_FromString(pool_of(self)->name().c_str());
}

PyObject* repr(PyObject* self) {
  const MemoryPool& pool = *pool_of(self);
  return PyUnicode_FromFormat("<MemoryPool '%s': %s on %s>", pool.name().c_str(),
                              std::string(pool.kind()).c_str(), to_string(pool.device()).c_str());
}

PyGetSetDef attributes[] = {
    {"device", get_device, nullptr, "The device that the memory serves.", nullptr},
    {"kind", get_kind, nullptr, "'direct', 'caching', 'driver' or 'pinned'.", nullptr},
    {"name", get_name, nullptr, "Who holds the memory, for reports.", nullptr},
    {"limit", get_limit, set_limit, "Most bytes held from the device, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// CPython stores every calling convention in one function pointer type; the way through void*
// states that.
template <typename Function>
PyCFunction as_method(Function function) noexcept {
  // NOLINTNEXTLINE(bugprone-casting-through-void)
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"allocate", as_method(allocate), METH_FASTCALL | METH_KEYWORDS,
     "allocate($self, /, nbytes, stream=None)\n--\n\nMemory for use in the order of a stream."},
    {"stats", stats, METH_NOARGS, "stats($self, /)\n--\n\nThe pool's numbers of this moment."},
    {"reset_peak", reset_peak, METH_NOARGS,
     "reset_peak($self, /)\n--\n\nLet the peaks start again from now."},
    {"trim", as_method(trim), METH_VARARGS | METH_KEYWORDS,
     "trim($self, /, keep=0)\n--\n\nGive unused memory back, down to `keep` bytes. Returns the "
     "bytes given "
     "back."},
    {"empty_cache", empty_cache, METH_NOARGS,
     "empty_cache($self, /)\n--\n\nGive all unused memory back. Returns the bytes given back."},
    {nullptr, nullptr, 0, nullptr},
};

constexpr const char* kDoc =
    "MemoryPool(device='cuda:0', kind='caching', limit=None, name=None)\n--\n\nA counted, limited "
    "source of "
    "memory on one device.";

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_tp_getset, attributes},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {0, nullptr},
};

PyType_Spec spec = {
    "xpuruntime._core.MemoryPool",
    sizeof(PoolObject),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    slots,
};

}  // namespace

StreamHandle to_stream(PyObject* object) {
  if (object == Py_None) return 0;
  if (PyLong_Check(object)) {
    const unsigned long long handle = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred() == nullptr) return static_cast<StreamHandle>(handle);
    PyErr_Clear();
    throw InputError("stream " + std::string(py::str(object)) + " is no stream handle");
  }
  const py::handle stream(object);
  if (py::hasattr(stream, "__cuda_stream__")) {
    return py::cast<StreamHandle>(py::tuple(stream.attr("__cuda_stream__")())[1]);
  }
  for (const char* name : {"cuda_stream", "ptr"}) {
    if (py::hasattr(stream, name)) return py::cast<StreamHandle>(stream.attr(name));
  }
  throw InputError("a stream is None, an integer handle, or an object with __cuda_stream__, not " +
                   std::string(py::str(py::type::of(stream))));
}

std::shared_ptr<MemoryPool> to_pool(py::handle object) {
  if (PyObject_TypeCheck(object.ptr(), pool_type) == 0) {
    throw InputError("a MemoryPool is needed, not " + std::string(py::str(py::type::of(object))));
  }
  return pool_of(object.ptr());
}

py::object to_python(std::shared_ptr<MemoryPool> pool) {
  PyObject* const self = pool_type->tp_alloc(pool_type, 0);
  if (self == nullptr) throw py::error_already_set();
  new (&pool_of(self)) std::shared_ptr<MemoryPool>(std::move(pool));
  return py::reinterpret_steal<py::object>(self);
}

void add_pool_type(py::module_& module) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  pool_type = reinterpret_cast<PyTypeObject*>(type);
  module.add_object("MemoryPool", type);
}

}  // namespace xpuruntime::bindings

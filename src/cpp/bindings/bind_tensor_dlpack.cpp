// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "bind.h"
#include "convert.h"
#include "exchange.h"
#include "xpuruntime/dlpack_exchange.h"
#include "xpuruntime/error.h"
#include "xpuruntime/stream_manager.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

constexpr const char* kVersioned = "dltensor_versioned";
constexpr const char* kUsedVersioned = "used_dltensor_versioned";
constexpr const char* kLegacy = "dltensor";
constexpr const char* kUsedLegacy = "used_dltensor";

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// A capsule that nobody took frees its tensor.
template <typename Managed>
void destroy_capsule(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (managed->deleter != nullptr) managed->deleter(managed);
}

template <typename Managed>
py::object make_capsule(Managed* managed, const char* name, PyCapsule_Destructor destructor) {
  PyObject* const capsule = PyCapsule_New(managed, name, destructor);
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

py::object export_capsule(const Tensor& tensor, bool versioned, bool copied) {
  if (versioned) {
    return make_capsule(to_dlpack(tensor, copied), kVersioned, [](PyObject* capsule) {
      destroy_capsule<DLManagedTensorVersioned>(capsule, kVersioned);
    });
  }
  return make_capsule(to_dlpack_legacy(tensor), kLegacy, [](PyObject* capsule) {
    destroy_capsule<DLManagedTensor>(capsule, kLegacy);
  });
}

bool readable_version(const DLManagedTensorVersioned* managed) {
  return managed->version.major == DLPACK_MAJOR_VERSION;
}
bool readable_version(const DLManagedTensor*) { return true; }

template <typename Managed>
Tensor consume(py::handle capsule, const char* name, const char* used_name, py::handle stream) {
  auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (managed == nullptr) throw py::error_already_set();
  std::optional<Stream> ready_on;
  // What a tensor of another version looks like is not known; from_dlpack says so.
  if (!stream.is_none() && readable_version(managed)) {
    const DeviceId device = from_dlpack_device(managed->dl_tensor.device);
    if (device.type == DeviceType::kCuda) ready_on = stream_argument(stream, device);
  }
  Tensor tensor = from_dlpack(managed, ready_on);
  // The tensor owns it from here on.
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw py::error_already_set();
  return tensor;
}

Tensor import_capsule(py::handle capsule, py::handle stream) {
  if (PyCapsule_IsValid(capsule.ptr(), kVersioned) != 0) {
    return consume<DLManagedTensorVersioned>(capsule, kVersioned, kUsedVersioned, stream);
  }
  if (PyCapsule_IsValid(capsule.ptr(), kLegacy) != 0) {
    return consume<DLManagedTensor>(capsule, kLegacy, kUsedLegacy, stream);
  }
  const char* const name = PyCapsule_GetName(capsule.ptr());
  if (name == nullptr) PyErr_Clear();
  const std::string text = name == nullptr ? "" : name;
  if (text == kUsedVersioned || text == kUsedLegacy) {
    throw InputError(
        "this DLPack capsule was imported already, which can be done once: call __dlpack__() "
        "again");
  }
  throw InputError("a capsule named '" + text +
                   "' is no DLPack capsule: pass the array itself, or what its "
                   "__dlpack__() returns");
}

}  // namespace

// The table of a type, or nothing. Types that have one are remembered, and kept alive by that. Of
// the others only the address of the last few is: should it be another type by now, that one is
// asked by __dlpack__, which is always right.
const Exchange* find_exchange(PyTypeObject* type) {
  static std::array<Exchange, 4> known{};
  static std::array<PyTypeObject*, 4> without{};
  static std::size_t next = 0;
  for (const Exchange& entry : known) {
    if (entry.type == type) return &entry;
  }
  if (std::find(without.begin(), without.end(), type) != without.end()) return nullptr;
  next = (next + 1) % known.size();
  const py::object found =
      py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  const DLPackExchangeAPI* api = nullptr;
  if (PyCapsule_IsValid(found.ptr(), "dlpack_exchange_api") != 0) {
    api = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(found.ptr(), "dlpack_exchange_api"));
  }
  if (api == nullptr || api->header.version.major != DLPACK_MAJOR_VERSION) {
    without[next] = type;
    return nullptr;
  }
  Exchange& entry = known[next];
  Py_INCREF(type);
  Py_XDECREF(entry.type);
  auto* const object = reinterpret_cast<PyObject*>(type);
  entry = {type, api, PyObject_HasAttrString(object, "requires_grad") != 0,
           PyObject_HasAttrString(object, "is_neg") != 0};
  return &entry;
}

void refuse_negation(py::handle object, const std::string& what) {
  static PyObject* const method = PyUnicode_InternFromString("is_neg");
  PyObject* const self = object.ptr();
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(method, &self, 1, nullptr));
  if (!answer) throw py::error_already_set();
  if (answer.ptr() != Py_True) return;
  throw UnsupportedOperationError(
      what +
          " has yet to be negated (is_neg()), and its memory would come without the minus: "
          "pass its resolve_neg()",
      "");
}

namespace {

// The C table does not ask what __dlpack__ asks: whether a gradient would be lost, or a conjugation
// is still pending.
bool needs_protocol(const Exchange& exchange, py::handle object, const DLTensor& tensor) {
  if (tensor.dtype.code == kDLComplex) return true;
  if (!exchange.has_gradients) return false;
  PyObject* const gradients = PyObject_GetAttrString(object.ptr(), "requires_grad");
  if (gradients == nullptr) throw py::error_already_set();
  const bool needs = gradients != Py_False;
  Py_DECREF(gradients);
  return needs;
}

// By value: what is asked of the object may run Python, which looks for other tables.
std::optional<Tensor> import_by_table(Exchange exchange, py::handle object, py::handle stream) {
  DLManagedTensorVersioned* managed = nullptr;
  if (exchange.api->managed_tensor_from_py_object_no_sync(object.ptr(), &managed) != 0) {
    PyErr_Clear();  // __dlpack__ says better why.
    return std::nullopt;
  }
  std::unique_ptr<DLManagedTensorVersioned, void (*)(DLManagedTensorVersioned*)> owned(
      managed, [](DLManagedTensorVersioned* self) {
        if (self->deleter != nullptr) self->deleter(self);
      });
  if (exchange.has_negation) refuse_negation(object, "this " + type_name(object));
  if (needs_protocol(exchange, object, managed->dl_tensor)) return std::nullopt;
  std::optional<Stream> ready_on;
  const DLDevice device = managed->dl_tensor.device;
  if (device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged) {
    void* current = nullptr;
    if (exchange.api->current_work_stream(device.device_type, device.device_id, &current) != 0) {
      throw py::error_already_set();
    }
    ready_on = Stream::wrap(from_dlpack_device(device), reinterpret_cast<StreamHandle>(current));
  }
  Tensor tensor = from_dlpack(managed, ready_on);
  (void)owned.release();
  if (ready_on) {
    if (const auto order = stream_argument(stream, tensor.device())) tensor.order_on(*order);
  }
  return tensor;
}

// object.__dlpack__(stream=number, max_version=(1, 0)), and without max_version for producers that
// do not know it.
py::object call_dlpack(py::handle object, std::optional<StreamHandle> number) {
  static PyObject* const method = PyUnicode_InternFromString("__dlpack__");
  static PyObject* const version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, 0);
  static PyObject* const both = Py_BuildValue("(ss)", "max_version", "stream");
  static PyObject* const version_only = Py_BuildValue("(s)", "max_version");
  static PyObject* const stream_only = Py_BuildValue("(s)", "stream");
  const py::object stream = number ? py::object(py::int_(*number)) : py::none();
  const std::array<PyObject*, 3> args{object.ptr(), version, stream.ptr()};
  PyObject* capsule =
      PyObject_VectorcallMethod(method, args.data(), 1, number ? both : version_only);
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError) != 0) {
    PyErr_Clear();
    const std::array<PyObject*, 2> old_args{object.ptr(), stream.ptr()};
    capsule = PyObject_VectorcallMethod(method, old_args.data(), 1, number ? stream_only : nullptr);
  }
  if (capsule == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(capsule);
}

// One of the two numbers of __dlpack_device__; integers of NumPy and enumerations are taken too.
std::optional<std::int32_t> device_number(PyObject* object) {
  PyObject* const number = PyNumber_Index(object);
  if (number == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow != 0 || value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    return std::nullopt;
  }
  return static_cast<std::int32_t>(value);
}

std::optional<DLDevice> to_dl_device(py::handle pair) {
  if (PyTuple_Check(pair.ptr()) == 0 || PyTuple_GET_SIZE(pair.ptr()) != 2) return std::nullopt;
  const auto type = device_number(PyTuple_GET_ITEM(pair.ptr(), 0));
  const auto index = device_number(PyTuple_GET_ITEM(pair.ptr(), 1));
  if (!type || !index) return std::nullopt;
  return DLDevice{static_cast<DLDeviceType>(*type), *index};
}

DLDevice device_of(py::handle object) {
  static PyObject* const method = PyUnicode_InternFromString("__dlpack_device__");
  const std::array<PyObject*, 1> args{object.ptr()};
  PyObject* const result = PyObject_VectorcallMethod(method, args.data(), 1, nullptr);
  if (result == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw InputError(
        "an object of type " + type_name(object) +
        " is no DLPack array (it has no __dlpack__ and "
        "__dlpack_device__): pass an array of NumPy, PyTorch, CuPy or JAX, or a DLPack capsule");
  }
  const auto answer = py::reinterpret_steal<py::object>(result);
  if (const auto device = to_dl_device(answer)) return *device;
  throw InputError("__dlpack_device__ of an object of type " + type_name(object) +
                   " returned an object of type " + type_name(answer) +
                   " that is no pair of a device type and a device number: its producer is broken");
}

}  // namespace

Tensor import_object(py::handle object, py::handle stream) {
  if (PyCapsule_CheckExact(object.ptr()) != 0) return import_capsule(object, stream);
  if (const Exchange* const exchange = find_exchange(Py_TYPE(object.ptr()))) {
    if (auto tensor = import_by_table(*exchange, object, stream)) return *std::move(tensor);
  }
  const DeviceId device = from_dlpack_device(device_of(object));
  if (device.type == DeviceType::kCpu) {
    return import_capsule(call_dlpack(object, std::nullopt), Py_None);
  }
  const Stream order =
      stream_argument(stream, device).value_or(StreamManager::instance().default_stream(device));
  require_stream_of(device, order);
  const StreamHandle number = order.handle() == 0 ? 1 : order.handle();
  return import_capsule(call_dlpack(object, number), py::cast(order));
}

namespace {

// `__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)`. Written against
// Python's own calling convention: consumers always pass keywords, which cost more through pybind11
// than all the rest.
py::object dlpack(py::handle self, PyObject* const* values, PyObject* names) {
  DlpackRequest request;
  bool versioned = false;
  const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    const auto is = [&](const char* text) {
      return PyUnicode_CompareWithASCIIString(name, text) == 0;
    };
    const py::handle value = values[i];
    try {
      if (is("max_version")) {
        versioned = !value.is_none() && value.cast<py::tuple>()[0].cast<int>() >= 1;
      } else if (is("stream")) {
        if (!value.is_none()) request.stream = value.cast<std::int64_t>();
      } else if (is("dl_device")) {
        if (value.is_none()) continue;
        request.device = to_dl_device(value);
        if (!request.device) throw py::cast_error();
      } else if (is("copy")) {
        if (!value.is_none()) request.copy = value.cast<bool>();
      } else {
        throw py::type_error("__dlpack__() got an unexpected keyword argument '" +
                             std::string(py::str(name)) + "'");
      }
    } catch (const py::cast_error&) {
      throw py::type_error("__dlpack__() got " + std::string(py::repr(value)) + " as " +
                           std::string(py::str(name)) + ", which is of the wrong type");
    }
  }
  const auto [tensor, copied] = prepare_export(self.cast<const Tensor&>(), request);
  return export_capsule(tensor, versioned, copied);
}

PyObject* dlpack_method(PyObject* self, PyObject* const* args, Py_ssize_t count,
                        PyObject* names) noexcept {
  try {
    if (count != 0) throw py::type_error("__dlpack__() takes keyword arguments only");
    return dlpack(self, args, names).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// `from_dlpack(array, stream=None)`, for the same reason.
PyObject* from_dlpack_function(PyObject*, PyObject* const* args, Py_ssize_t count,
                               PyObject* names) noexcept {
  try {
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    py::handle array = count > 0 ? args[0] : nullptr;
    py::handle stream = count > 1 ? args[1] : Py_None;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(names, i);
      const auto is = [&](const char* text) {
        return PyUnicode_CompareWithASCIIString(name, text) == 0;
      };
      if (is("array") && count < 1) {
        array = args[count + i];
      } else if (is("stream") && count < 2) {
        stream = args[count + i];
      } else {
        throw py::type_error("from_dlpack() got an unexpected argument '" +
                             std::string(py::str(name)) + "'");
      }
    }
    if (array.ptr() == nullptr || count > 2)
      throw py::type_error("from_dlpack() takes an array and a stream");
    return py::cast(import_object(array, stream)).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <typename Function>
PyCFunction as_c_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef from_dlpack_definition{
    "from_dlpack", as_c_function(from_dlpack_function), METH_FASTCALL | METH_KEYWORDS,
    "from_dlpack(array, stream=None)\n--\n\nShare the memory of any DLPack array."};

PyMethodDef dlpack_definition{
    "__dlpack__", as_c_function(dlpack_method), METH_FASTCALL | METH_KEYWORDS,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "A DLPack capsule on the same memory."};

}  // namespace

void bind_tensor_dlpack(TensorClass& tensor) {
  tensor.def("__dlpack_device__", [](const Tensor& self) {
    const DLDevice device = dlpack_device(self);
    return py::make_tuple(static_cast<std::int32_t>(device.device_type), device.device_id);
  });
  auto* const type = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  tensor.attr("from_dlpack") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&from_dlpack_definition, nullptr));
  tensor.attr("__dlpack__") =
      py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &dlpack_definition));
}

}  // namespace xpuruntime::bindings

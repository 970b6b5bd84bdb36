// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "gil.h"
#include "xpuruntime/cuda_array_exchange.h"
#include "xpuruntime/error.h"
#include "xpuruntime/event.h"
#include "xpuruntime/memory_pool.h"
#include "xpuruntime/tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

using Unlocked = py::call_guard<ReleaseGil>;
using MaybeStream = std::optional<Stream>;

py::tuple to_tuple(std::span<const std::int64_t> values) {
  py::tuple tuple(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

Tensor empty(const std::vector<std::int64_t>& shape, const std::string& dtype,
             const py::object& device, const py::object& pool, const py::object& stream) {
  const DeviceId id = device_argument(device);
  std::shared_ptr<MemoryPool> source = pool.is_none() ? nullptr : to_pool(pool);
  const MaybeStream order = stream_argument(stream, id);
  const ReleaseGil unlocked;
  return Tensor::empty(shape, parse_dtype(dtype), id, std::move(source), order);
}

// The CUDA device that a copy between the two concerns.
DeviceId cuda_side(DeviceId target, DeviceId source) {
  return target.type == DeviceType::kCuda ? target : source;
}

Tensor to(const Tensor& self, const py::object& device, const py::object& stream) {
  const DeviceId id = device_argument(device);
  const MaybeStream order = stream_argument(stream, cuda_side(id, self.device()));
  const ReleaseGil unlocked;
  return self.to(id, order);
}

Tensor copy(const Tensor& self, const py::object& stream) {
  const MaybeStream order = stream_argument(stream, self.device());
  const ReleaseGil unlocked;
  return self.copy(order);
}

Tensor contiguous(const Tensor& self, const py::object& stream) {
  const MaybeStream order = stream_argument(stream, self.device());
  const ReleaseGil unlocked;
  return self.contiguous(order);
}

py::object copy_from(const py::object& self, const Tensor& source, const py::object& stream) {
  const auto& destination = self.cast<const Tensor&>();
  const MaybeStream order =
      stream_argument(stream, cuda_side(destination.device(), source.device()));
  {
    const ReleaseGil unlocked;
    destination.copy_from(source, order);
  }
  return self;
}

MaybeStream some_stream(const Tensor& self, const py::object& stream) {
  MaybeStream order = stream_argument(stream, self.device());
  if (!order)
    throw InputError("a stream is needed, not None: pass the one that the work was given to");
  return order;
}

// Consumers look whether the attribute is there, so what has none raises AttributeError.
py::dict cuda_array_interface(const Tensor& self) {
  CudaArray array;
  try {
    array = to_cuda_array(self);
  } catch (const UnsupportedOperationError& error) {
    throw py::attribute_error(error.what());
  }
  py::dict dict;
  dict["version"] = 3;
  dict["shape"] = to_tuple(array.shape);
  dict["typestr"] = array.typestr;
  dict["data"] = py::make_tuple(reinterpret_cast<std::uintptr_t>(array.data), array.readonly);
  dict["strides"] = array.strides ? py::object(to_tuple(*array.strides)) : py::none();
  dict["stream"] = array.stream ? py::object(py::int_(*array.stream)) : py::none();
  return dict;
}

Tensor from_cuda_array_interface(const py::object& array, const py::object& stream) {
  if (!py::hasattr(array, "__cuda_array_interface__")) {
    throw InputError(
        "an object of type " + std::string(Py_TYPE(array.ptr())->tp_name) +
        " has no __cuda_array_interface__: pass an array on a CUDA device, such as one of CuPy");
  }
  const auto dict = array.attr("__cuda_array_interface__").cast<py::dict>();
  const auto get = [&](const char* key) -> py::object {
    return dict.contains(key) ? py::object(dict[key]) : py::none();
  };
  if (!get("mask").is_none()) {
    throw UnsupportedOperationError("a masked array cannot be shared: fill or drop its mask first");
  }
  const std::string broken =
      "the __cuda_array_interface__ of " + std::string(Py_TYPE(array.ptr())->tp_name) +
      " lacks data, shape or typestr, or they are of the wrong kind: its producer is broken";
  CudaArray described;
  try {
    const auto data = dict["data"].cast<py::tuple>();
    described.data = reinterpret_cast<void*>(data[0].cast<std::uintptr_t>());
    described.readonly = data[1].cast<bool>();
    described.typestr = dict["typestr"].cast<std::string>();
    described.shape = dict["shape"].cast<std::vector<std::int64_t>>();
    described.strides = get("strides").cast<std::optional<std::vector<std::int64_t>>>();
    described.stream = get("stream").cast<std::optional<std::int64_t>>();
  } catch (const py::builtin_exception&) {
    throw InputError(broken);
  } catch (const py::error_already_set&) {
    throw InputError(broken);
  }
  Tensor tensor = from_cuda_array(described, array.ptr(), release_object);
  array.inc_ref();
  if (const MaybeStream order = stream_argument(stream, tensor.device())) tensor.order_on(*order);
  return tensor;
}

}  // namespace

void bind_tensor(py::module_& module) {
  TensorClass tensor(module, "Tensor", "Typed, shaped bytes on a device.");
  tensor
      .def_static("empty", empty, "shape"_a, "dtype"_a = "float32", "device"_a = "cpu",
                  py::kw_only(), "pool"_a = py::none(), "stream"_a = py::none(),
                  "Contiguous and uninitialised.")
      .def_static("from_cuda_array_interface", from_cuda_array_interface, "array"_a, py::kw_only(),
                  "stream"_a = py::none(),
                  "Share the memory of an array with __cuda_array_interface__.")
      .def_property_readonly("shape",
                             [](const Tensor& self) { return to_tuple(self.layout().shape()); })
      .def_property_readonly(
          "strides", [](const Tensor& self) { return to_tuple(self.layout().strides()); },
          "In elements, not bytes.")
      .def_property_readonly("ndim", [](const Tensor& self) { return self.layout().rank(); })
      .def_property_readonly("size", [](const Tensor& self) { return self.layout().elements(); })
      .def_property_readonly("itemsize", [](const Tensor& self) { return self.dtype().itemsize(); })
      .def_property_readonly("nbytes", &Tensor::nbytes)
      .def_property_readonly("dtype", [](const Tensor& self) { return to_string(self.dtype()); })
      .def_property_readonly("device", [](const Tensor& self) { return to_string(self.device()); })
      .def_property_readonly(
          "data_ptr",
          [](const Tensor& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("readonly", &Tensor::readonly)
      .def_property_readonly("pinned",
                             [](const Tensor& self) { return self.kind() == MemoryKind::kPinned; })
      .def_property_readonly("is_contiguous", &Tensor::is_contiguous)
      .def_property_readonly(
          "ready_event", [](const Tensor& self) { return self.storage().ready_event(); },
          "The event after which the bytes are readable; None when no device works on them.")
      .def("to", to, "device"_a, py::kw_only(), "stream"_a = py::none(),
           "This tensor where it is on `device` already, else a copy there.")
      .def("copy", copy, py::kw_only(), "stream"_a = py::none(), "A contiguous copy.")
      .def("contiguous", contiguous, py::kw_only(), "stream"_a = py::none(),
           "This tensor where it is contiguous, else a contiguous copy.")
      .def("copy_", copy_from, "source"_a, py::kw_only(), "stream"_a = py::none(),
           "Overwrite with the bytes of `source`. Returns this tensor.")
      .def(
          "record",
          [](const Tensor& self, const py::object& stream) {
            self.record(*some_stream(self, stream));
          },
          "stream"_a, "Say that work given to the stream so far writes here.")
      .def(
          "record_use",
          [](const Tensor& self, const py::object& stream) {
            self.storage().used_by(*some_stream(self, stream));
          },
          "stream"_a,
          "Say that work given to the stream uses the memory: nobody else gets it before that is "
          "done.")
      .def(
          "make_wait",
          [](const Tensor& self, const py::object& stream) {
            self.storage().make_wait(*some_stream(self, stream));
          },
          "stream"_a, "Later work on the stream starts when the bytes are readable.")
      .def(
          "order_on",
          [](const Tensor& self, const py::object& stream) {
            self.order_on(*some_stream(self, stream));
            return self;
          },
          "stream"_a, "Make the bytes readable in the order of the stream. Returns this tensor.")
      .def("synchronize", &Tensor::synchronize, Unlocked(), "Block until the bytes are readable.")
      .def_property_readonly("__cuda_array_interface__", cuda_array_interface)
      .def("__repr__", &Tensor::describe);
  bind_tensor_dlpack(tensor);
  bind_tensor_numpy(tensor);
}

}  // namespace xpuruntime::bindings

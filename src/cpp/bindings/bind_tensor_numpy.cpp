// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/numpy.h>

#include <string>
#include <string_view>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "exchange.h"
#include "xpuruntime/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

constexpr int kFirstUserType = 256;  // NPY_USERDEF: types of other packages, such as ml_dtypes.

DType from_numpy_dtype(const py::dtype& dtype) {
  if (dtype.num() >= kFirstUserType) {
    const auto package = dtype.attr("type").attr("__module__").cast<std::string>();
    if (package.starts_with("ml_dtypes"))
      return parse_dtype(dtype.attr("name").cast<std::string>());
  } else if (dtype.byteorder() != '>' &&
             std::string_view("biufc").find(dtype.kind()) != std::string_view::npos) {
    const char order = dtype.itemsize() == 1 ? '|' : '<';
    return parse_typestr(std::string{order, dtype.kind()} + std::to_string(dtype.itemsize()));
  }
  return parse_typestr(dtype.attr("str").cast<std::string>());
}

}  // namespace

py::dtype to_numpy_dtype(DType type) {
  const std::string name = to_string(type);
  const std::string typestr = to_typestr(type);
  if (!typestr.empty()) return py::dtype(typestr);
  py::object package;
  try {
    package = py::module_::import("ml_dtypes");
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    throw UnsupportedOperationError("NumPy itself has no " + name +
                                        ": install the package that adds it "
                                        "(pip install ml_dtypes)",
                                    "cpu");
  }
  if (!py::hasattr(package, name.c_str())) {
    throw UnsupportedOperationError(
        "NumPy and ml_dtypes have no " + name + ": exchange the tensor by DLPack", "cpu");
  }
  return py::dtype::from_args(package.attr(name.c_str()));
}

Tensor import_numpy(const py::object& object) {
  if (!py::isinstance<py::array>(object)) {
    throw InputError("from_numpy takes a numpy.ndarray, and this is of type " +
                     std::string(Py_TYPE(object.ptr())->tp_name) +
                     ": use from_dlpack, or numpy.asarray first");
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  const DType dtype = from_numpy_dtype(array.dtype());
  const auto itemsize = static_cast<py::ssize_t>(dtype.itemsize());
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    if (array.strides(i) % itemsize != 0 && array.shape(i) > 1) {
      throw InputError("a stride of " + std::to_string(array.strides(i)) +
                       " bytes is no multiple of the " + std::to_string(itemsize) + " bytes of " +
                       to_string(dtype) +
                       ": make the array contiguous first (numpy.ascontiguousarray)");
    }
    shape.push_back(array.shape(i));
    strides.push_back(array.strides(i) / itemsize);
  }
  auto storage = std::make_shared<Storage>();
  Tensor tensor(storage, const_cast<void*>(array.data()), dtype, Layout(shape, strides), DeviceId{},
                !array.writeable());
  storage->on_release(object.inc_ref().ptr(), release_object);
  return tensor;
}

namespace {

py::array to_numpy(const py::object& self) {
  const auto& tensor = self.cast<const Tensor&>();
  tensor.require_host_readable("read as a NumPy array");
  const py::dtype dtype = to_numpy_dtype(tensor.dtype());
  const auto itemsize = static_cast<py::ssize_t>(tensor.dtype().itemsize());
  std::vector<py::ssize_t> shape(tensor.layout().shape().begin(), tensor.layout().shape().end());
  std::vector<py::ssize_t> strides;
  for (const std::int64_t stride : tensor.layout().strides()) strides.push_back(stride * itemsize);
  py::array array(dtype, std::move(shape), std::move(strides), tensor.data(), self);
  if (tensor.readonly()) {
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  }
  return array;
}

py::object to_array(const py::object& self, const py::object& dtype, const py::object& copy) {
  const py::array array = to_numpy(self);
  if (!dtype.is_none() && !py::dtype::from_args(dtype).equal(array.dtype())) {
    if (copy.is(py::bool_(false))) {
      throw UnsupportedOperationError(self.cast<const Tensor&>().describe() +
                                          " cannot be read as " + std::string(py::str(dtype)) +
                                          " without a copy, which copy=False forbids",
                                      "cpu");
    }
    return array.attr("astype")(dtype);
  }
  return copy.is(py::bool_(true)) ? array.attr("copy")() : py::object(array);
}

}  // namespace

void bind_tensor_numpy(TensorClass& tensor) {
  tensor.def_static("from_numpy", import_numpy, "array"_a, "Share the memory of a NumPy array.")
      .def("numpy", to_numpy, "A NumPy array on the same memory; CPU tensors only.")
      .def("__array__", to_array, "dtype"_a = py::none(), "copy"_a = py::none());
}

}  // namespace xpuruntime::bindings

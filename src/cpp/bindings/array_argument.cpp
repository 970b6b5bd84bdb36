// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "array_argument.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "error_text.h"
#include "torch_tensor.h"
#include "xpuruntime/dlpack_exchange.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

std::string type_name(PyObject* object) { return Py_TYPE(object)->tp_name; }

// Whether the library records gradients now and for this tensor.
bool would_lose_gradient(PyObject* object) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* const wants = PyObject_GetAttr(object, name);
  if (wants == nullptr) throw py::error_already_set();
  Py_DECREF(wants);
  if (wants != Py_True) return false;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch")) return true;
  return modules["torch"].attr("is_grad_enabled")().cast<bool>();
}

// The package that a type is of.
std::string root_module(PyObject* object) {
  const py::object module =
      py::getattr(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__module__", py::none());
  if (!py::isinstance<py::str>(module)) return "";
  const auto package = module.cast<std::string>();
  return package.substr(0, package.find('.'));
}

PyTypeObject* known_array_type() {
  static PyObject* const type =
      py::object(py::module_::import("numpy").attr("ndarray")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

// What its library says against sharing an array, with the argument's name. An interrupt and the
// like go on as they are.
[[noreturn]] void throw_named(const py::error_already_set& error, const char* name) {
  if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) {
    throw py::error_already_set(error);
  }
  throw InputError(std::string("'") + name + "' cannot be shared: " + error_text(error));
}

template <typename Values>
void copy_dims(Operand& operand, const Values& shape, const std::int64_t* strides) {
  const std::size_t rank = operand.rank;
  std::int64_t dense = 1;
  for (std::size_t i = rank; i-- > 0;) {
    operand.shape[i] = shape[i];
    operand.strides[i] = strides == nullptr ? dense : strides[i];
    dense *= shape[i];
  }
}

Operand view_of(const OutputSpec& spec, DeviceId device, void* data, const std::int64_t* strides) {
  Operand view;
  view.name = spec.name;
  view.absent = false;
  view.rank = spec.rank;
  view.dtype = spec.dtype;
  view.device = device;
  view.data = data;
  copy_dims(view, spec.shape, strides);
  return view;
}

void require_few_dimensions(const Operand& operand, std::size_t rank) {
  if (rank <= Operand::kMaxRank) return;
  throw InputError(std::string("'") + operand.name + "' has " + std::to_string(rank) +
                   " dimensions, and at most " + std::to_string(Operand::kMaxRank) +
                   " are possible: reshape it");
}

struct AllocatorError {
  std::string text;
};

void keep_error(void* context, const char* kind, const char* message) {
  static_cast<AllocatorError*>(context)->text = std::string(kind) + ": " + message;
}

// [n, c, h, w] as a view of memory that holds [n, h, w, c].
void channels_last_strides(const std::int64_t* shape, std::int64_t* strides) {
  strides[1] = 1;
  strides[3] = shape[1];
  strides[2] = shape[1] * shape[3];
  strides[0] = shape[1] * shape[3] * shape[2];
}

Tensor make_tensor(const OutputSpec& spec, DeviceId device, const std::optional<Stream>& stream) {
  Tensor made = Tensor::empty(spec.dims(), spec.dtype, device, nullptr, stream);
  if (!spec.channels_last) return made;
  // The same number of elements in another order, so the memory serves.
  std::array<std::int64_t, 4> strides{};
  channels_last_strides(spec.shape.data(), strides.data());
  struct Keep {
    Tensor tensor;
  };
  auto storage = std::make_shared<Storage>();
  auto keep = std::make_unique<Keep>(Keep{made});
  storage->on_release(keep.release(),
                      [](void* context) noexcept { delete static_cast<Keep*>(context); });
  return Tensor(std::move(storage), made.data(), spec.dtype, Layout(spec.dims(), strides), device);
}

}  // namespace

ArrayArgument::ArrayArgument(PyObject* object, const char* name, bool below_autograd) {
  operand_.name = name;
  if (object == Py_None) return;
  object_ = object;
  const py::handle handle(object);
  if (const Exchange* const exchange = find_exchange(Py_TYPE(object));
      exchange != nullptr && exchange->api->dltensor_from_py_object_no_sync != nullptr) {
    api_ = exchange->api;
    take_table(*exchange, below_autograd);
    return;
  }
  if (py::isinstance<Tensor>(handle)) {
    take_tensor(handle.cast<const Tensor&>());
    return;
  }
  kind_ = py::isinstance<py::array>(handle) ? Kind::kNumpy : Kind::kOther;
  try {
    import_other();
  } catch (const InputError& error) {
    throw InputError(std::string("'") + name + "': " + error.what());
  } catch (const UnsupportedOperationError& error) {
    throw UnsupportedOperationError(std::string("'") + name + "': " + error.what(), "");
  } catch (const CudaError& error) {
    throw CudaError(std::string("'") + name + "': " + error.what(), error.device(), error.status());
  } catch (const py::error_already_set& error) {
    throw_named(error, name);
  }
  const Kind kind = kind_;
  take_tensor(*imported_);
  kind_ = kind;
}

void ArrayArgument::import_other() {
  const auto object = py::reinterpret_borrow<py::object>(object_);
  if (kind_ == Kind::kNumpy) {
    if (Py_TYPE(object_) != known_array_type() && py::hasattr(object, "mask")) {
      throw InputError(
          "a masked array, whose mask would be lost: pass its filled(...) values, or .data");
    }
    imported_ = import_numpy(object);
  } else {
    py::object order = py::none();
    if (root_module(object_) == "cupy") {
      const auto cuda = py::module_::import("cupy").attr("cuda");
      current_ = cuda.attr("get_current_stream")(object.attr("device").attr("id"))
                     .attr("ptr")
                     .cast<StreamHandle>();
      order = py::int_(current_);
    }
    imported_ = import_object(object, order);
  }
}

void ArrayArgument::take_table(Exchange exchange, bool below_autograd) {
  kind_ = Kind::kTable;
  DLTensor view;
  if (api_->dltensor_from_py_object_no_sync(object_, &view) != 0) {
    throw_named(py::error_already_set(), operand_.name);
  }
  if (view.dtype.code == kDLComplex) {
    throw UnsupportedOperationError(std::string("'") + operand_.name +
                                    "' is complex: no operation here takes complex numbers");
  }
  if (!below_autograd && exchange.has_negation) {
    refuse_negation(object_, std::string("'") + operand_.name + "'");
  }
  if (!below_autograd && exchange.has_gradients && would_lose_gradient(object_)) {
    throw UnsupportedOperationError(
        std::string("'") + operand_.name +
        "' requires a gradient, and none is recorded here: call it under torch.no_grad(), or "
        "pass " +
        operand_.name + ".detach()");
  }
  require_few_dimensions(operand_, static_cast<std::size_t>(view.ndim));
  operand_.absent = false;
  operand_.rank = static_cast<std::uint8_t>(view.ndim);
  operand_.dtype = {view.dtype.code, view.dtype.bits, view.dtype.lanes};
  operand_.device = from_dlpack_device(view.device);
  operand_.data = static_cast<char*>(view.data) + view.byte_offset;
  copy_dims(operand_, view.shape, view.strides);
}

void ArrayArgument::take_tensor(const Tensor& tensor) {
  kind_ = Kind::kTensor;
  tensor_ = &tensor;
  const Layout& layout = tensor.layout();
  require_few_dimensions(operand_, layout.rank());
  operand_.absent = false;
  operand_.readonly = tensor.readonly();
  operand_.rank = static_cast<std::uint8_t>(layout.rank());
  operand_.dtype = tensor.dtype();
  operand_.device = tensor.device();
  operand_.data = tensor.data();
  copy_dims(operand_, layout.shape(), layout.strides().data());
}

std::optional<StreamHandle> ArrayArgument::current_stream() const {
  if (operand_.device.type != DeviceType::kCuda) return std::nullopt;
  if (kind_ == Kind::kOther) return current_;
  if (kind_ != Kind::kTable) return std::nullopt;
  void* current = nullptr;
  if (api_->current_work_stream(kDLCUDA, operand_.device.index, &current) != 0) {
    throw py::error_already_set();
  }
  return reinterpret_cast<StreamHandle>(current);
}

void ArrayArgument::order_before(const Stream& stream) const {
  if (tensor_ != nullptr) {
    tensor_->order_on(stream);
  } else if (const auto current = current_stream(); current && *current != stream.handle()) {
    stream.wait_stream(Stream::wrap(operand_.device, *current));
  }
}

void ArrayArgument::order_after(const Stream& stream, bool written) const {
  if (kind_ == Kind::kTensor && tensor_ != nullptr) {
    if (written) tensor_->record(stream);
    tensor_->storage().used_by(stream);
  } else if (const auto current = current_stream(); current && *current != stream.handle()) {
    Stream::wrap(operand_.device, *current).wait_stream(stream);
  }
}

py::object ArrayArgument::make_by_torch(const OutputSpec& spec, Operand& view) const {
  std::array<std::int64_t, Operand::kMaxRank> strides{};
  std::int64_t dense = 1;
  for (std::size_t i = spec.rank; i-- > 0;) {
    strides[i] = dense;
    dense *= std::max<std::int64_t>(spec.shape[i], 1);
  }
  if (spec.channels_last) channels_last_strides(spec.shape.data(), strides.data());
  void* data = nullptr;
  py::object made =
      make_torch_tensor(object_, spec.dims(), {strides.data(), spec.rank}, spec.dtype, &data);
  if (!made) return {};
  view = view_of(spec, operand_.device, data, strides.data());
  return made;
}

py::object ArrayArgument::make_by_table(const OutputSpec& spec, Operand& view) const {
  std::array<std::int64_t, Operand::kMaxRank> shape = spec.shape;
  DLTensor prototype{};
  prototype.device = {operand_.device.type == DeviceType::kCuda ? kDLCUDA : kDLCPU,
                      operand_.device.index};
  prototype.ndim = spec.rank;
  prototype.dtype = {spec.dtype.code, spec.dtype.bits, spec.dtype.lanes};
  prototype.shape = shape.data();
  DLManagedTensorVersioned* managed = nullptr;
  AllocatorError error;
  if (api_->managed_tensor_allocator(&prototype, &managed, &error, keep_error) != 0) {
    PyErr_Clear();
    throw OutOfMemoryError(
        type_name(object_) + " cannot allocate '" + spec.name + "': " + error.text,
        to_string(operand_.device), 0);
  }
  if (spec.channels_last) {
    if (managed->dl_tensor.strides == nullptr) {
      if (managed->deleter != nullptr) managed->deleter(managed);
      throw UnsupportedOperationError(
          type_name(object_) + " cannot make '" + spec.name +
              "' channels last, as 'x' is: pass one with out=, or a contiguous 'x'",
          to_string(operand_.device));
    }
    channels_last_strides(spec.shape.data(), managed->dl_tensor.strides);
  }
  const DLTensor& tensor = managed->dl_tensor;
  view = view_of(spec, operand_.device, static_cast<char*>(tensor.data) + tensor.byte_offset,
                 tensor.strides);
  void* made = nullptr;
  if (api_->managed_tensor_to_py_object_no_sync(managed, &made) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
}

py::object ArrayArgument::make_like(const OutputSpec& spec, const std::optional<Stream>& stream,
                                    Operand& view) const {
  if (kind_ == Kind::kTable) {
    // What a DLPack table makes is no memory of PyTorch's allocator to it, so that it knows no
    // `record_stream`; and it takes longer.
    if (py::object made = make_by_torch(spec, view)) return made;
    return make_by_table(spec, view);
  }
  py::object made;
  if (kind_ == Kind::kNumpy && !spec.channels_last) {
    const py::dtype dtype = spec.dtype == operand_.dtype
                                ? py::reinterpret_borrow<py::array>(object_).dtype()
                                : to_numpy_dtype(spec.dtype);
    made = py::array(dtype, std::vector<py::ssize_t>(spec.dims().begin(), spec.dims().end()));
  } else {
    made = py::cast(make_tensor(spec, operand_.device, stream));
    if (kind_ == Kind::kNumpy) made = made.attr("numpy")();
  }
  view = ArrayArgument(made.ptr(), spec.name).operand();
  return made;
}

void ArrayArgument::order_made(const py::object& made, const Stream& stream) const {
  if (kind_ == Kind::kTable) {
    order_after(stream, true);  // it is of the same library, and on the same device
  } else {
    ArrayArgument(made.ptr(), "made").order_after(stream, true);
  }
}

py::object ArrayArgument::hand_over(py::object made) const {
  if (kind_ != Kind::kOther) return made;
  const std::string root = root_module(object_);
  const py::dict modules = py::module_::import("sys").attr("modules");
  for (const std::string& name :
       {root, root.starts_with("jax") ? std::string("jax.dlpack") : root}) {
    if (!modules.contains(name)) continue;
    const py::object importer = py::getattr(modules[name.c_str()], "from_dlpack", py::none());
    if (!importer.is_none()) return importer(made);
  }
  return made;
}

}  // namespace xpuruntime::bindings

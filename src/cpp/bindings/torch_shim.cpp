// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "torch_shim.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr const char* kLibrary = "libtorch_cpu.so";
constexpr const char* kPythonLibrary = "libtorch_python.so";
// THPVariable_Wrap(const at::TensorBase&), which has no name in C.
constexpr const char* kWrap = "_Z16THPVariable_WrapRKN2at10TensorBaseE";

std::atomic<const TorchShim*> opened{nullptr};

template <typename Function>
bool take(Function& function, const char* name) noexcept {
  function = reinterpret_cast<Function>(find_loaded(kLibrary, name));
  return function != nullptr;
}

// The first function that lacks, or nothing.
std::string_view take_all(TorchShim& shim) {
  // NOLINTBEGIN(readability-braces-around-statements): a list
  if (!take(shim.dim, "aoti_torch_get_dim")) return "aoti_torch_get_dim";
  if (!take(shim.sizes, "aoti_torch_get_sizes")) return "aoti_torch_get_sizes";
  if (!take(shim.strides, "aoti_torch_get_strides")) return "aoti_torch_get_strides";
  if (!take(shim.dtype, "aoti_torch_get_dtype")) return "aoti_torch_get_dtype";
  if (!take(shim.device_type, "aoti_torch_get_device_type")) return "aoti_torch_get_device_type";
  if (!take(shim.device_index, "aoti_torch_get_device_index")) return "aoti_torch_get_device_index";
  if (!take(shim.data, "torch_get_const_data_ptr")) return "torch_get_const_data_ptr";
  if (!take(shim.empty, "aoti_torch_empty_strided")) return "aoti_torch_empty_strided";
  if (!take(shim.copy_handle, "aoti_torch_new_tensor_handle")) {
    return "aoti_torch_new_tensor_handle";
  }
  if (!take(shim.drop, "aoti_torch_delete_tensor_object")) return "aoti_torch_delete_tensor_object";
  if (!take(shim.open_library, "aoti_torch_library_init_impl")) {
    return "aoti_torch_library_init_impl";
  }
  if (!take(shim.implement, "torch_library_impl")) return "torch_library_impl";
  if (!take(shim.close_library, "aoti_torch_delete_library_object")) {
    return "aoti_torch_delete_library_object";
  }
  // NOLINTEND(readability-braces-around-statements)
  shim.wrap = reinterpret_cast<PyObject* (*)(const void*)>(find_loaded(kPythonLibrary, kWrap));
  return shim.wrap == nullptr ? "THPVariable_Wrap" : "";
}

// Where all the objects hold the address that PyTorch says is their tensor's; 0 where no place is.
std::size_t find_offset(const py::sequence& tensors) {
  for (std::size_t offset = sizeof(PyObject); offset <= 4 * sizeof(PyObject);
       offset += sizeof(void*)) {
    bool fits = py::len(tensors) > 0;
    for (const py::handle tensor : tensors) {
      const Py_ssize_t size = Py_TYPE(tensor.ptr())->tp_basicsize;
      if (static_cast<std::size_t>(size) < offset + sizeof(void*)) return 0;
      std::uintptr_t found = 0;
      std::memcpy(&found, reinterpret_cast<const char*>(tensor.ptr()) + offset, sizeof found);
      fits = fits && found == tensor.attr("_cdata").cast<std::uintptr_t>();
    }
    if (fits) return offset;
  }
  return 0;
}

// Whether the functions say of a tensor what Python says.
bool agrees(const TorchShim& shim, py::handle tensor) {
  TorchTensor handle = shim.tensor_of(tensor.ptr());
  std::int64_t dim = -1;
  const void* data = nullptr;
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  if (shim.dim(handle, &dim) != 0 || shim.data(handle, &data) != 0 ||
      shim.sizes(handle, &sizes) != 0 || shim.strides(handle, &strides) != 0 ||
      dim != tensor.attr("dim")().cast<std::int64_t>() ||
      reinterpret_cast<std::uintptr_t>(data) != tensor.attr("data_ptr")().cast<std::uintptr_t>()) {
    return false;
  }
  for (std::int64_t i = 0; i < dim; ++i) {
    if (sizes[i] != tensor.attr("size")(i).cast<std::int64_t>() ||
        strides[i] != tensor.attr("stride")(i).cast<std::int64_t>()) {
      return false;
    }
  }
  const auto wrapped = py::reinterpret_steal<py::object>(shim.wrap(handle));
  return wrapped.is(tensor);
}

// Tensors of several classes, on memory of one.
py::tuple samples(const py::module_& torch, const py::object& type) {
  const py::object plain = torch.attr("empty_strided")(py::make_tuple(2, 3), py::make_tuple(5, 1),
                                                       py::arg("device") = "cpu");
  const py::object subclass = py::type::of(type)("Subclass", py::make_tuple(type), py::dict());
  return py::make_tuple(plain, torch.attr("nn").attr("Parameter")(plain),
                        plain.attr("as_subclass")(subclass));
}

// PyTorch's number of a type, or nothing.
std::optional<std::int32_t> torch_dtype(DType dtype) {
  static const std::vector<std::pair<DType, std::int32_t>> known = [] {
    std::vector<std::pair<DType, std::int32_t>> found;
    for (const char* const name : {"float64", "float32", "float16", "bfloat16", "int64", "int32",
                                   "int16", "int8", "uint8", "bool"}) {
      std::int32_t (*number)() = nullptr;
      if (take(number, (std::string("aoti_torch_dtype_") + name).c_str())) {
        found.emplace_back(parse_dtype(name), number());
      }
    }
    return found;
  }();
  for (const auto& [type, number] : known) {
    if (type == dtype) return number;
  }
  return std::nullopt;
}

}  // namespace

void* find_loaded(const char* library, const char* function) noexcept {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = dlsym(handle, function);
  dlclose(handle);  // gives back what dlopen has counted; PyTorch is never unloaded
  return found;
}

const TorchShim* torch_shim() noexcept { return opened.load(std::memory_order_acquire); }

std::string open_torch_shim() {
  if (torch_shim() != nullptr) return "";
  TorchShim shim{};
  if (const std::string_view lacking = take_all(shim); !lacking.empty()) {
    return "this PyTorch has no " + std::string(lacking);
  }
  try {
    const py::module_ torch = py::module_::import("torch");
    const py::object type = torch.attr("Tensor");
    const py::tuple tensors = samples(torch, type);
    shim.offset = find_offset(tensors);
    if (shim.offset == 0) return "where this PyTorch's objects hold their tensors is not known";
    for (const py::handle tensor : tensors) {
      if (!agrees(shim, tensor)) return "this PyTorch's C functions do not say what Python does";
    }
    shim.type = reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr());
  } catch (const py::error_already_set& error) {
    return std::string("PyTorch's C functions could not be tried: ") + error.what();
  }
  opened.store(new TorchShim(shim), std::memory_order_release);  // for as long as the process lives
  return "";
}

namespace {

// Opens the functions with the first object of PyTorch's; once, whatever comes of it.
const TorchShim* shim_for(PyTypeObject* type) {
  static bool tried = false;
  if (tried || torch_shim() != nullptr) return torch_shim();
  const auto name = py::handle(reinterpret_cast<PyObject*>(type)).attr("__module__");
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!py::str(name).cast<std::string>().starts_with("torch") || !modules.contains("torch")) {
    return nullptr;
  }
  tried = true;
  (void)open_torch_shim();
  return torch_shim();
}

}  // namespace

py::object make_torch_tensor(PyObject* like, std::span<const std::int64_t> shape,
                             std::span<const std::int64_t> strides, DType dtype) {
  const TorchShim* const shim = shim_for(Py_TYPE(like));
  if (shim == nullptr || PyType_IsSubtype(Py_TYPE(like), shim->type) == 0) return {};
  TorchTensor model = shim->tensor_of(like);
  const std::optional<std::int32_t> type = torch_dtype(dtype);
  std::int32_t device = 0;
  std::int32_t index = 0;
  TorchTensor made = nullptr;
  if (!type || shim->device_type(model, &device) != 0 || shim->device_index(model, &index) != 0 ||
      shim->empty(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), *type,
                  device, index, &made) != 0) {
    return {};
  }
  const auto drop = [shim](void* tensor) { shim->drop(tensor); };
  const std::unique_ptr<void, decltype(drop)> owned(made, drop);
  const auto object = py::reinterpret_steal<py::object>(shim->wrap(made));
  if (!object) throw py::error_already_set();
  return object;
}

}  // namespace xpuruntime::bindings

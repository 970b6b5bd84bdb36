// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "torch_shim.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string_view>

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
  const TorchTensor handle = shim.tensor_of(tensor.ptr());
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

}  // namespace

void* find_loaded(const char* library, const char* function) noexcept {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = dlsym(handle, function);
  dlclose(handle);  // gives back what dlopen has counted; PyTorch is never unloaded
  return found;
}

const TorchShim* torch_shim() noexcept { return opened.load(std::memory_order_acquire); }

std::string open_torch_shim(const py::sequence& tensors) {
  if (torch_shim() != nullptr) return "";
  TorchShim shim{};
  if (const std::string_view lacking = take_all(shim); !lacking.empty()) {
    return "this PyTorch has no " + std::string(lacking);
  }
  shim.offset = find_offset(tensors);
  if (shim.offset == 0) return "where this PyTorch's objects hold their tensors is not known";
  for (const py::handle tensor : tensors) {
    if (!agrees(shim, tensor)) return "this PyTorch's C functions do not say what Python does";
  }
  opened.store(new TorchShim(shim), std::memory_order_release);  // for as long as the process lives
  return "";
}

}  // namespace xpuruntime::bindings

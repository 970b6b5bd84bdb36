// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "torch_dispatcher.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <typeindex>
#include <utility>

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr const char* kLibrary = "libtorch_cpu.so";
// One that no library has reason to replace.
constexpr const char* kSample = "aten::dot";

// PyTorch's structures, as 2.11 to 2.13 have them. What has a destructor there has one here, so
// that it is handed over in the same way; what it owns is always nothing.

// c10::KernelFunction
struct KernelFunction {
  void* functor = nullptr;
  void* boxed = nullptr;
  void* plain = nullptr;
  void* symbolic = nullptr;  // takes sizes that may be symbols
  void* tokens = nullptr;

  ~KernelFunction() {}  // NOLINT(modernize-use-equals-default): not trivial
};

// c10::impl::AnnotatedKernel
struct AnnotatedKernel {
  KernelFunction function;
  void* schema;
  const char* text;  // of a std::string
  std::size_t length;
};

// c10::OperatorHandle
struct OperatorHandle {
  const void* entry;
  const void* node;

  ~OperatorHandle() {}  // NOLINT(modernize-use-equals-default): not trivial
};

// c10::OperatorName
struct OperatorName {
  std::string name;
  std::string overload;

  explicit OperatorName(const std::string& whole) : name(whole.substr(0, whole.find('.'))) {
    if (name.size() < whole.size()) overload = whole.substr(name.size() + 1);
  }
};

// c10::RegistrationHandleRAII
struct Registration {
  std::function<void()> undo;

  Registration(Registration&& other) noexcept : undo(std::exchange(other.undo, nullptr)) {}
  ~Registration() {
    if (undo) undo();
  }
};

// c10::FunctionSchema
struct FunctionSchema {};

using Key = std::uint16_t;

struct Dispatcher {
  void* (*singleton)();
  OperatorHandle (*find)(void*, const char*, const char*);
  const AnnotatedKernel* (*kernel)(const void*, Key);
  Registration (*place)(void*, OperatorName, std::optional<Key>, KernelFunction,
                        std::optional<std::type_index>, std::unique_ptr<FunctionSchema>,
                        std::string);
  void* undefined;  // what a tensor holds that is none
};

// Written with the GIL.
std::optional<Dispatcher> opened;

template <typename Function>
bool take(Function& function, const char* name) noexcept {
  function = reinterpret_cast<Function>(find_loaded(kLibrary, name));
  return function != nullptr;
}

// The first function that lacks, or nothing.
std::string_view take_all(Dispatcher& dispatcher) {
  TorchStatus (*make_undefined)(TorchTensor*) = nullptr;
  // NOLINTBEGIN(readability-braces-around-statements): a list
  if (!take(dispatcher.singleton, "_ZN3c1010Dispatcher13realSingletonEv")) {
    return "Dispatcher::realSingleton";
  }
  if (!take(dispatcher.find, "_ZN3c1010Dispatcher17findSchemaOrThrowEPKcS2_")) {
    return "Dispatcher::findSchemaOrThrow";
  }
  if (!take(dispatcher.kernel,
            "_ZNK3c104impl13OperatorEntry23getKernelForDispatchKeyENS_11DispatchKeyE")) {
    return "OperatorEntry::getKernelForDispatchKey";
  }
  if (!take(dispatcher.place,
            "_ZN3c1010Dispatcher12registerImplENS_12OperatorNameESt8optionalINS_11DispatchKeyEENS_"
            "14KernelFunctionES2_INS_4impl12CppSignatureEESt10unique_ptrINS_14FunctionSchemaESt14"
            "default_deleteISA_EENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE")) {
    return "Dispatcher::registerImpl";
  }
  TorchTensor undefined = nullptr;
  if (!take(make_undefined, "aoti_torch_new_uninitialized_tensor") ||
      make_undefined(&undefined) != 0) {
    return "aoti_torch_new_uninitialized_tensor";
  }
  // NOLINTEND(readability-braces-around-statements)
  std::memcpy(static_cast<void*>(&dispatcher.undefined), undefined, sizeof dispatcher.undefined);
  torch_shim()->drop(undefined);
  return "";
}

Key key_of(const std::string& name) {
  const py::object keys = py::module_::import("torch._C").attr("DispatchKey");
  return py::cast<Key>(keys.attr(name.c_str()).attr("value"));
}

// Whether an address is one of PyTorch's functions.
bool is_code(void* address) noexcept {
  Dl_info found{};
  return address != nullptr && dladdr(address, &found) != 0 && found.dli_fname != nullptr &&
         std::string_view(found.dli_fname).find("libtorch") != std::string_view::npos;
}

const AnnotatedKernel* kernel_at(const Dispatcher& dispatcher, const std::string& name,
                                 const std::string& key) {
  const OperatorName parts(name);
  const OperatorHandle found =
      dispatcher.find(dispatcher.singleton(), parts.name.c_str(), parts.overload.c_str());
  return found.entry == nullptr ? nullptr : dispatcher.kernel(found.entry, key_of(key));
}

// Whether a kernel of PyTorch's own is where it is looked for, told by the text that it comes with.
bool agrees(const Dispatcher& dispatcher) {
  const py::object dump = py::module_::import("torch._C").attr("_dispatch_dump_table");
  const std::string table = "\n" + py::cast<std::string>(dump(kSample));
  constexpr std::string_view begin = "\nCPU: ";
  const std::size_t at = table.find(begin);
  const std::size_t end = table.find(" [kernel]", at);
  const AnnotatedKernel* const kernel = kernel_at(dispatcher, kSample, "CPU");
  if (at == std::string::npos || end == std::string::npos || kernel == nullptr) return false;
  const std::string_view text =
      std::string_view(table).substr(at + begin.size(), end - at - begin.size());
  // The length is compared first: where it is the right one, the address before is one of a text.
  return text.find("RegisterCPU") != std::string_view::npos && kernel->length == text.size() &&
         std::memcmp(kernel->text, text.data(), text.size()) == 0 &&
         kernel->function.functor != nullptr && !is_code(kernel->function.functor) &&
         is_code(kernel->function.boxed) && is_code(kernel->function.plain) &&
         kernel->function.symbolic == nullptr;
}

}  // namespace

TorchOwned TorchOwned::of(TorchTensor handle) {
  TorchTensor copy = nullptr;
  if (torch_shim()->copy_handle(handle, &copy) != 0) {
    throw std::runtime_error("PyTorch gives no reference to a tensor");
  }
  TorchOwned owned;
  std::memcpy(static_cast<void*>(&owned.tensor_), copy, sizeof owned.tensor_);
  std::memcpy(copy, static_cast<const void*>(&opened->undefined), sizeof opened->undefined);
  torch_shim()->drop(copy);
  return owned;
}

py::object TorchScalar::object() const {
  switch (kind) {
    case Kind::kFloat:
      return py::float_(value.real);
    case Kind::kInteger:
      return py::int_(value.integer);
    case Kind::kUnsigned:
      return py::int_(value.natural);
    case Kind::kComplex: {
      auto made = py::reinterpret_steal<py::object>(PyComplex_FromDoubles(value.real, imaginary));
      if (!made) throw py::error_already_set();
      return made;
    }
    case Kind::kTruth:
      return py::bool_(value.integer != 0);
  }
  throw py::type_error("a number that PyTorch hands over is a symbol; call it outside of tracing");
}

std::string open_torch_dispatcher() {
  if (opened) return "";
  if (torch_shim() == nullptr) return "PyTorch's C functions are not open";
  Dispatcher dispatcher{};
  if (const std::string_view lacking = take_all(dispatcher); !lacking.empty()) {
    return "this PyTorch has no " + std::string(lacking);
  }
  try {
    if (!agrees(dispatcher))
      return "where this PyTorch's kernels keep their functions is not known";
  } catch (const std::exception& error) {
    return std::string("PyTorch's dispatcher could not be tried: ") + error.what();
  }
  opened = dispatcher;
  return "";
}

TorchFunctions find_functions(const std::string& name, const std::string& key) {
  const AnnotatedKernel* const kernel = kernel_at(*opened, name, key);
  if (kernel == nullptr || kernel->function.symbolic != nullptr) return {};
  return {kernel->function.functor, kernel->function.boxed, kernel->function.plain};
}

std::function<void()> place_functions(const std::string& name, const std::string& key,
                                      const TorchFunctions& functions) {
  KernelFunction kernel;
  kernel.boxed = functions.boxed;  // no functor, as that would be counted
  kernel.plain = functions.plain;
  auto placed = std::make_shared<Registration>(
      opened->place(opened->singleton(), OperatorName(name), key_of(key), kernel, std::nullopt,
                    nullptr, "xpuruntime: a gate without Python"));
  return [placed = std::move(placed)]() mutable { placed.reset(); };
}

}  // namespace xpuruntime::bindings

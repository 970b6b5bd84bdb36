// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operator_call.h"

#include <bit>
#include <memory>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr const char* kLibrary = "libtorch_cpu.so";

TorchValueShim functions{};

void check(TorchStatus status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("PyTorch does not say ") + what);
}

template <typename T>
T* pointer(TorchValue value) noexcept {
  return reinterpret_cast<T*>(value);
}

bool is_tensor(char kind) noexcept { return kind == 't' || kind == 'o'; }

}  // namespace

std::string open_torch_values() {
  TorchValueShim found{};
  const auto take = [](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(find_loaded(kLibrary, name));
    return function != nullptr ? "" : name;
  };
  for (const std::string_view lacking :
       {take(found.list_size, "torch_list_size"), take(found.list_item, "torch_list_get_item"),
        take(found.drop_list, "torch_delete_list"),
        take(found.make_undefined, "aoti_torch_new_uninitialized_tensor"),
        take(found.is_defined, "aoti_torch_is_defined"),
        take(found.offset, "aoti_torch_get_storage_offset"),
        take(found.view, "aoti_torch__reinterpret_tensor"),
        take(found.records_gradients, "aoti_torch_grad_mode_is_enabled")}) {
    if (!lacking.empty()) return "this PyTorch has no " + std::string(lacking);
  }
  (void)take(found.drop_optional, "torch_delete_stable_ivalue");
  functions = found;
  return "";
}

const TorchValueShim& torch_values() noexcept { return functions; }

OperatorCall::OperatorCall(const OperatorSignature& signature, TorchValue* values)
    : signature_(&signature), values_(values) {
  for (std::size_t i = 0; i < size(); ++i) read(i, values[i]);
}

OperatorCall::OperatorCall(const OperatorSignature& signature, const py::args& arguments)
    : signature_(&signature), values_(nullptr) {
  if (arguments.size() != size()) throw py::type_error("the operator has other arguments");
  for (std::size_t i = 0; i < size(); ++i) read(i, arguments[i]);
}

OperatorCall::OperatorCall(const OperatorSignature& signature)
    : signature_(&signature), values_(nullptr) {}

OperatorCall::~OperatorCall() {
  const TorchShim& torch = *torch_shim();
  // PyTorch looks at no result of a call that has failed.
  if (values_ == nullptr || std::uncaught_exceptions() > errors_) {
    for (TorchTensor& made : results_) {
      if (made != nullptr) torch.drop(std::exchange(made, nullptr));
    }
  }
  if (values_ == nullptr) return;
  for (std::size_t i = 0; i < size(); ++i) {
    if (is_tensor(signature_->arguments[i]) && tensor(i) != nullptr) torch.drop(tensor(i));
  }
  for (std::size_t i = 0; i < signature_->results; ++i) {
    values_[i] = reinterpret_cast<TorchValue>(results_[i]);
  }
}

void OperatorCall::read(std::size_t at, TorchValue value) {
  Argument& argument = arguments_[at];
  const char kind = signature_->arguments[at];
  if (kind == 'o' || kind == 'g') {
    auto* const inner = pointer<TorchValue>(value);
    if (inner == nullptr) return;
    value = *inner;
    if (functions.drop_optional == nullptr) {
      delete inner;
    } else {
      functions.drop_optional(inner);
    }
  }
  argument.given = true;
  switch (kind) {
    case 't':
      argument.tensor = pointer<void>(value);
      return;
    case 'o':
      read_optional(at, pointer<void>(value));
      return;
    case 'f':
    case 'g':
      argument.number = std::bit_cast<double>(value);
      return;
    case 'b':
      argument.bits = static_cast<std::uint32_t>(value & 1U);
      return;
    default:
      read_list(at, value, kind == 'm');
  }
}

// Autograd hands over one that was not given as a tensor that is not defined.
void OperatorCall::read_optional(std::size_t at, TorchTensor tensor) {
  bool defined = false;
  arguments_[at].tensor = tensor;
  check(functions.is_defined(tensor, &defined), "whether a tensor is defined");
  if (defined) return;
  torch_shim()->drop(tensor);
  arguments_[at] = {};
}

void OperatorCall::read_list(std::size_t at, TorchValue value, bool bools) {
  auto* const list = pointer<void>(value);
  const auto drop = [](void* given) { functions.drop_list(given); };
  const std::unique_ptr<void, decltype(drop)> owned(list, drop);
  std::size_t count = 0;
  check(functions.list_size(list, &count), "how long a list is");
  Argument& argument = arguments_[at];
  argument.count = static_cast<std::uint32_t>(count);
  if (!bools) kept_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    TorchValue item = 0;
    check(functions.list_item(list, i, &item), "what is in a list");
    if (bools) {
      argument.bits |= static_cast<std::uint32_t>(item & 1U) << i;
    } else {
      kept_.push_back(static_cast<std::int64_t>(item));
    }
  }
  if (!bools) integers_ = kept_;
}

void OperatorCall::read(std::size_t at, const py::handle& value) {
  Argument& argument = arguments_[at];
  argument.given = !value.is_none();
  switch (signature_->arguments[at]) {
    case 'o':
    case 'g':
      if (!argument.given) return;
      break;
    default:
      break;
  }
  switch (signature_->arguments[at]) {
    case 't':
    case 'o':
      argument.tensor = handle_of(value);
      return;
    case 'f':
    case 'g':
      argument.number = value.cast<double>();
      return;
    case 'b':
      argument.bits = value.cast<bool>() ? 1 : 0;
      return;
    case 'm':
      for (const py::handle one : value) {
        argument.bits |= (one.cast<bool>() ? 1U : 0U) << argument.count++;
      }
      return;
    default:
      for (const py::handle one : value) kept_.push_back(one.cast<std::int64_t>());
      integers_ = kept_;
  }
}

TorchTensor OperatorCall::handle_of(const py::handle& object) const {
  const TorchShim& torch = *torch_shim();
  if (PyObject_TypeCheck(object.ptr(), torch.type) == 0) {
    throw py::type_error(std::string(signature_->name) + ": a tensor is expected");
  }
  return torch.tensor_of(object.ptr());
}

void OperatorCall::put_tensor(std::size_t at, TorchTensor tensor) noexcept {
  arguments_[at].tensor = tensor;
  arguments_[at].given = true;
}

void OperatorCall::put_optional(std::size_t at, TorchTensor tensor) {
  bool defined = false;
  check(functions.is_defined(tensor, &defined), "whether a tensor is defined");
  if (defined) put_tensor(at, tensor);
}

void OperatorCall::put_integers(std::size_t at, std::span<const std::int64_t> values) noexcept {
  integers_ = values;
  arguments_[at].given = true;
}

void OperatorCall::put_bits(std::size_t at, std::uint32_t bits, std::size_t count) noexcept {
  arguments_[at].bits = bits;
  arguments_[at].count = static_cast<std::uint32_t>(count);
  arguments_[at].given = true;
}

void OperatorCall::put_number(std::size_t at, double number) noexcept {
  arguments_[at].number = number;
  arguments_[at].given = true;
}

py::object OperatorCall::object(std::size_t at) const {
  const Argument& argument = arguments_[at];
  if (!argument.given) return py::none();
  switch (signature_->arguments[at]) {
    case 't':
    case 'o': {
      auto made = py::reinterpret_steal<py::object>(torch_shim()->wrap(argument.tensor));
      if (!made) throw py::error_already_set();
      return made;
    }
    case 'f':
    case 'g':
      return py::float_(argument.number);
    case 'b':
      return py::bool_(argument.bits != 0);
    case 'm': {
      py::list made;
      for (std::uint32_t i = 0; i < argument.count; ++i) {
        made.append(py::bool_((argument.bits >> i & 1U) != 0));
      }
      return made;
    }
    default: {
      py::list made;
      for (const std::int64_t one : integers_) made.append(py::int_(one));
      return made;
    }
  }
}

void OperatorCall::give(std::size_t at, TorchTensor result) noexcept {
  if (results_[at] != nullptr) torch_shim()->drop(results_[at]);
  results_[at] = result;
}

TorchTensor OperatorCall::release(std::size_t at) noexcept {
  return std::exchange(results_[at], nullptr);
}

void OperatorCall::take(const py::object& returned) {
  const bool many = signature_->results > 1;
  if (many &&
      (!py::isinstance<py::sequence>(returned) || py::len(returned) != signature_->results)) {
    throw py::type_error(std::string(signature_->name) + ": a kernel of Python gave other results");
  }
  for (std::size_t i = 0; i < signature_->results; ++i) {
    const py::object one = many ? py::object(returned[py::int_(i)]) : returned;
    TorchTensor made = nullptr;
    const TorchStatus status = one.is_none() ? functions.make_undefined(&made)
                                             : torch_shim()->copy_handle(handle_of(one), &made);
    check(status, "what a kernel of Python gave");
    give(i, made);
  }
}

py::object OperatorCall::returned() const {
  py::list made;
  for (std::size_t i = 0; i < signature_->results; ++i) {
    bool defined = false;
    check(functions.is_defined(results_[i], &defined), "whether a tensor is defined");
    if (!defined) {
      made.append(py::none());
      continue;
    }
    const auto object = py::reinterpret_steal<py::object>(torch_shim()->wrap(results_[i]));
    if (!object) throw py::error_already_set();
    made.append(object);
  }
  if (signature_->results == 1) return made[0];
  return py::tuple(made);
}

}  // namespace xpuruntime::bindings

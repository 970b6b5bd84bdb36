// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "bind.h"
#include "direct_gate.h"
#include "gil.h"
#include "plain_kernel.h"
#include "product_operator.h"
#include "torch_dispatcher.h"
#include "torch_shim.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

using Scalar = const TorchScalar*;

constexpr std::array<std::string_view, 8> kNames = {"mm",    "mm.out",    "bmm",     "bmm.out",
                                                    "addmm", "addmm.out", "baddbmm", "baddbmm.out"};
constexpr std::array<std::string_view, 2> kKeys = {"CPU", "CUDA"};
constexpr std::size_t kSlots = kNames.size() * kKeys.size();

// A gate that PyTorch calls as it calls its own kernels.
struct Slot {
  std::atomic<DirectGate*> gate{nullptr};
  NativeKernel native;

  bool knows(const ProductTensors& tensors) const noexcept {
    return gate.load(std::memory_order_acquire)->knows(tensors);
  }
};

std::array<Slot, kSlots> slots;

py::object wrapped(TorchTensor tensor) {
  auto object = py::reinterpret_steal<py::object>(torch_shim()->wrap(tensor));
  if (!object) throw py::error_already_set();
  return object;
}

// A call in the form that PyTorch calls kernels in Python: numbers that are the default are left
// out. With the GIL.
class PythonCall {
 public:
  PythonCall(const ProductTensors& tensors, Scalar beta, Scalar alpha) {
    for (TorchTensor tensor : {tensors.c, tensors.a, tensors.b}) {
      if (tensor != nullptr) add(wrapped(tensor));
    }
    count_ = size_;
    if (beta != nullptr && !is_default(*beta)) add(beta->object(), "beta");
    if (alpha != nullptr && !is_default(*alpha)) add(alpha->object(), "alpha");
    if (tensors.out != nullptr) add(wrapped(tensors.out), "out");
  }
  PyObject* const* values() const noexcept { return values_.data(); }
  Py_ssize_t count() const noexcept { return static_cast<Py_ssize_t>(count_); }
  py::object names() const { return size_ == count_ ? py::object() : py::tuple(names_); }

 private:
  static bool is_default(const TorchScalar& number) noexcept {
    return number.kind == TorchScalar::Kind::kInteger && number.is_one();
  }
  void add(py::object value, const char* name = nullptr) {
    if (name != nullptr) names_.append(name);
    owned_[size_] = std::move(value);
    values_[size_] = owned_[size_].ptr();
    ++size_;
  }

  std::array<py::object, 6> owned_;
  std::array<PyObject*, 6> values_{};
  py::list names_;
  std::size_t size_ = 0;
  std::size_t count_ = 0;
};

TorchOwned taken(py::handle made) {
  const TorchShim& torch = *torch_shim();
  if (PyObject_TypeCheck(made.ptr(), torch.type) == 0) {
    throw py::type_error("a matrix product of Python gave no tensor");
  }
  return TorchOwned::of(torch.tensor_of(made.ptr()));
}

// What Python gives. With the GIL.
py::object answer(const Slot& slot, const ProductTensors& tensors, Scalar beta, Scalar alpha) {
  const PythonCall call(tensors, beta, alpha);
  const py::object names = call.names();
  auto done = py::reinterpret_steal<py::object>(
      slot.gate.load()->ask(call.values(), call.count(), names.ptr()));
  if (!done) throw py::error_already_set();
  return done;
}

TorchOwned ask(const Slot& slot, const ProductTensors& tensors, Scalar beta, Scalar alpha) {
  return with_gil([&] { return taken(answer(slot, tensors, beta, alpha)); });
}

TorchTensor ask_into(const Slot& slot, const ProductTensors& tensors, Scalar beta, Scalar alpha) {
  with_gil([&] { (void)answer(slot, tensors, beta, alpha); });
  return tensors.out;
}

// The forms of products, as PyTorch calls them.

template <std::size_t kSlot>
TorchOwned two(void* /*functor*/, TorchKeys keys, TorchTensor a, TorchTensor b) {
  const Slot& slot = slots[kSlot];
  const ProductTensors tensors{nullptr, a, b, nullptr};
  if (slot.knows(tensors)) return slot.native.run<TorchOwned>(keys, a, b);
  return ask(slot, tensors, nullptr, nullptr);
}

template <std::size_t kSlot>
TorchTensor two_into(void* /*functor*/, TorchKeys keys, TorchTensor a, TorchTensor b,
                     TorchTensor out) {
  const Slot& slot = slots[kSlot];
  const ProductTensors tensors{nullptr, a, b, out};
  if (slot.knows(tensors)) return slot.native.run<TorchTensor>(keys, a, b, out);
  return ask_into(slot, tensors, nullptr, nullptr);
}

template <std::size_t kSlot>
TorchOwned three(void* /*functor*/, TorchKeys keys, TorchTensor c, TorchTensor a, TorchTensor b,
                 Scalar beta, Scalar alpha) {
  const Slot& slot = slots[kSlot];
  const ProductTensors tensors{c, a, b, nullptr};
  if (beta->is_one() && alpha->is_one() && slot.knows(tensors)) {
    return slot.native.run<TorchOwned>(keys, c, a, b, beta, alpha);
  }
  return ask(slot, tensors, beta, alpha);
}

template <std::size_t kSlot>
TorchTensor three_into(void* /*functor*/, TorchKeys keys, TorchTensor c, TorchTensor a,
                       TorchTensor b, Scalar beta, Scalar alpha, TorchTensor out) {
  const Slot& slot = slots[kSlot];
  const ProductTensors tensors{c, a, b, out};
  if (beta->is_one() && alpha->is_one() && slot.knows(tensors)) {
    return slot.native.run<TorchTensor>(keys, c, a, b, beta, alpha, out);
  }
  return ask_into(slot, tensors, beta, alpha);
}

// For what calls with values of the interpreter: goes on to the kernel below.
template <std::size_t kSlot>
void boxed(void* /*functor*/, const void* op, TorchKeys keys, void* stack) {
  slots[kSlot].native.run_boxed(op, keys, stack);
}

template <std::size_t kSlot>
TorchFunctions functions_of() {
  constexpr std::size_t kName = kSlot / kKeys.size();
  TorchFunctions functions;
  functions.boxed = reinterpret_cast<void*>(boxed<kSlot>);
  if constexpr (kName == 0 || kName == 2) {
    functions.plain = reinterpret_cast<void*>(two<kSlot>);
  } else if constexpr (kName == 1 || kName == 3) {
    functions.plain = reinterpret_cast<void*>(two_into<kSlot>);
  } else if constexpr (kName == 4 || kName == 6) {
    functions.plain = reinterpret_cast<void*>(three<kSlot>);
  } else {
    functions.plain = reinterpret_cast<void*>(three_into<kSlot>);
  }
  return functions;
}

template <std::size_t... kSlot>
std::array<TorchFunctions, kSlots> all_functions(std::index_sequence<kSlot...> /*all*/) {
  return {functions_of<kSlot>()...};
}

py::object place_plain_gate(const std::string& name, const std::string& key, const py::object& slow,
                            const py::object& native, const py::object& keyset,
                            const py::object& place_below) {
  static const auto functions = all_functions(std::make_index_sequence<kSlots>());
  const auto found = place_of(kNames, kKeys, name, key);
  const std::string full = "aten::" + name;
  const TorchFunctions kernel = found ? find_functions(full, key) : TorchFunctions{};
  py::object below = place_below();
  if (below.is_none() || kernel.plain == nullptr) return below;
  Slot& slot = slots[*found];
  if (DirectGate* const before = slot.gate.load(); before != nullptr) {
    before->renew(slow, native);
  } else {
    const ProductOperator op(name, key);
    slot.gate = new DirectGate(name, slow, native, keyset, op.kernel, op.adds, op.into);
  }
  return slot.native.place(full, key, kernel, functions[*found], below);
}

// A trial, whether a gate such as these is called with what it should be.

struct Trial {
  TorchFunctions native;
  PyObject* ask = nullptr;
} trial;

TorchOwned try_out(void* /*functor*/, TorchKeys keys, TorchTensor c, TorchTensor a, TorchTensor b,
                   Scalar beta, Scalar alpha) {
  {
    const AcquireGil gil;
    const PythonCall call({c, a, b, nullptr}, beta, alpha);
    const py::object names = call.names();
    const auto done = py::reinterpret_steal<py::object>(PyObject_Vectorcall(
        trial.ask, call.values(), static_cast<std::size_t>(call.count()), names.ptr()));
    if (!done) throw py::error_already_set();
    if (!done.is_none()) return taken(done);
  }
  using Function =
      TorchOwned (*)(void*, TorchKeys, TorchTensor, TorchTensor, TorchTensor, Scalar, Scalar);
  return reinterpret_cast<Function>(trial.native.plain)(trial.native.functor, keys, c, a, b, beta,
                                                        alpha);
}

void try_out_boxed(void* /*functor*/, const void* /*op*/, TorchKeys /*keys*/, void* /*stack*/) {
  throw std::runtime_error("PyTorch called a kernel with values of its interpreter");
}

py::object place_trial(const py::object& asked) {
  trial = {find_functions("aten::addmm", "CPU"), py::object(asked).release().ptr()};
  if (trial.native.plain == nullptr) return py::none();
  return removal(place_functions("aten::sspaddmm", "CPU",
                                 {nullptr, reinterpret_cast<void*>(try_out_boxed),
                                  reinterpret_cast<void*>(try_out)}),
                 py::cpp_function([] {}));
}

}  // namespace

void bind_plain_gate(py::module_& module) {
  module.def("open_torch_dispatcher", open_torch_dispatcher,
             "Find PyTorch's dispatcher. Returns what is against using it, or nothing.");
  module.def(
      "place_trial", place_trial, py::arg("asked"),
      "Put a function over sspaddmm of dense tensors, which PyTorch always refuses, that asks "
      "Python, and calls addmm where that says None. Returns what removes it, or None.");
  module.def("place_plain_gate", place_plain_gate, py::arg("name"), py::arg("key"), py::arg("slow"),
             py::arg("native"), py::arg("keyset"), py::arg("place_below"),
             "Put a gate that is called without Python over another, which `place_below` places. "
             "Returns what removes both, or None.");
}

}  // namespace xpuruntime::bindings

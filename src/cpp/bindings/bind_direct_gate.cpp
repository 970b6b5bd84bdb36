// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bind.h"
#include "direct_gate.h"
#include "gil.h"
#include "product_operator.h"
#include "torch_library.h"
#include "torch_shim.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// As a kernel in Python: for operators with a Scalar, which PyTorch does not hand over in C.

void drop_gate(PyObject* capsule) {
  delete static_cast<DirectGate*>(PyCapsule_GetPointer(capsule, nullptr));
}

PyObject* call_direct(PyObject* self, PyObject* const* values, Py_ssize_t count,
                      PyObject* names) noexcept {
  try {
    // Another thread may take the gate away while the native kernel runs.
    const auto kept = py::reinterpret_borrow<py::object>(self);
    DirectGate& gate = *static_cast<DirectGate*>(PyCapsule_GetPointer(self, nullptr));
    ProductTensors tensors;
    if (gate.take(values, count, names, tensors) && gate.knows(tensors)) {
      if (PyObject* const done =
              gate.native_object(tensors, gate.into() ? values[count] : nullptr)) {
        return done;
      }
    }
    return gate.ask(values, count, names);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef method = {"direct_gate",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_direct)),
                      METH_FASTCALL | METH_KEYWORDS,
                      "A matrix product: calls its native kernel, or asks Python which one."};

py::object make_direct_gate(const py::str& name, const std::string& key, const py::object& slow,
                            const py::object& native, const py::object& keyset) {
  const ProductOperator op(name, key);
  if (torch_shim() == nullptr || op.kernel == nullptr) return py::none();
  auto gate = std::make_unique<DirectGate>(name, slow, native, keyset, op.kernel, op.adds, op.into);
  const auto self =
      py::reinterpret_steal<py::object>(PyCapsule_New(gate.get(), nullptr, drop_gate));
  if (!self) throw py::error_already_set();
  (void)gate.release();
  PyObject* const made = PyCFunction_New(&method, self.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// As a kernel in C, which PyTorch calls without Python.

constexpr std::array<std::string_view, 4> kPackets = {"mm", "mm.out", "bmm", "bmm.out"};
constexpr std::array<std::string_view, 2> kKeys = {"CPU", "CUDA"};
constexpr std::size_t kSlots = kPackets.size() * kKeys.size();

// Gates are never dropped, since a thread may still be inside one that has been taken away.
std::array<std::atomic<DirectGate*>, kSlots> gates{};

// Owns what PyTorch has handed over.
class Arguments {
 public:
  Arguments(const TorchShim& torch, TorchValue* values, std::size_t count)
      : torch_(torch), values_(values), count_(count) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (std::size_t i = 0; i < count_; ++i) torch_.drop(at(i));
    values_[0] = reinterpret_cast<TorchValue>(result_);
  }
  TorchTensor at(std::size_t i) const { return reinterpret_cast<TorchTensor>(values_[i]); }
  // Hands a tensor to PyTorch.
  void give(TorchTensor result) { result_ = result; }
  // Hands `out` back.
  void give_last() { result_ = at(--count_); }

 private:
  const TorchShim& torch_;
  TorchValue* values_;
  std::size_t count_;
  TorchTensor result_ = nullptr;
};

void serve(DirectGate& gate, TorchValue* values) {
  const TorchShim& torch = *torch_shim();
  const std::size_t count = gate.into() ? 3 : 2;
  Arguments arguments(torch, values, count);
  ProductTensors tensors;
  tensors.a = arguments.at(0);
  tensors.b = arguments.at(1);
  tensors.out = gate.into() ? arguments.at(2) : nullptr;
  TorchTensor made = nullptr;
  if (gate.knows(tensors) && gate.run_native(tensors, &made)) {
    if (gate.into()) {
      arguments.give_last();
    } else {
      arguments.give(made);
    }
    return;
  }
  const AcquireGil gil;
  std::array<py::object, 3> objects;
  std::array<PyObject*, 3> plain{};
  for (std::size_t i = 0; i < count; ++i) {
    objects[i] = py::reinterpret_steal<py::object>(torch.wrap(arguments.at(i)));
    if (!objects[i]) throw py::error_already_set();
    plain[i] = objects[i].ptr();
  }
  static PyObject* const out = py::make_tuple("out").release().ptr();
  const auto done = with_gil([&] {
    return py::reinterpret_steal<py::object>(
        gate.ask(plain.data(), 2, gate.into() ? out : nullptr));
  });
  if (!done) throw py::error_already_set();
  if (torch.copy_handle(torch.tensor_of(done.ptr()), &made) != 0) {
    throw py::type_error("a matrix product of Python gave no tensor");
  }
  arguments.give(made);
}

template <std::size_t kSlot>
void enter(TorchValue* values, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  serve(*gates[kSlot].load(std::memory_order_acquire), values);
}

template <std::size_t... kSlot>
constexpr std::array<TorchKernel, kSlots> entries(std::index_sequence<kSlot...> /*all*/) {
  return {enter<kSlot>...};
}

std::optional<std::size_t> slot_of(std::string_view name, std::string_view key) {
  for (std::size_t i = 0; i < kPackets.size(); ++i) {
    for (std::size_t j = 0; j < kKeys.size(); ++j) {
      if (kPackets[i] == name && kKeys[j] == key) return i * kKeys.size() + j;
    }
  }
  return std::nullopt;
}

py::object place_kernel(const std::string& name, const std::string& key, const py::object& slow,
                        const py::object& native, const py::object& keyset) {
  static constexpr auto kEntries = entries(std::make_index_sequence<kSlots>());
  const auto slot = slot_of(name, key);
  const ProductOperator op(name, key);
  if (torch_shim() == nullptr || !slot || op.kernel == nullptr) return py::none();
  if (DirectGate* const before = gates[*slot].load(); before != nullptr) {
    before->renew(slow, native);
  } else {
    gates[*slot].store(new DirectGate(name, slow, native, keyset, op.kernel, op.adds, op.into),
                       std::memory_order_release);
  }
  return open_torch_library("aten", key, name, kEntries[*slot]);
}

// Raises LookupError, as an error of Python's that passes through PyTorch.
void raise(TorchValue* values, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  const Arguments arguments(*torch_shim(), values, 1);
  const AcquireGil gil;
  PyErr_SetString(PyExc_LookupError, "raised by xpuruntime, to see whether it arrives");
  throw py::error_already_set();
}

py::object place_raising_kernel(const std::string& space, const std::string& name) {
  return open_torch_library(space.c_str(), "CPU", name, raise);
}

}  // namespace

void bind_direct_gate(py::module_& module) {
  module.def("open_torch", open_torch_shim,
             "Find PyTorch's C functions. Returns what is against using them, or nothing.");
  module.def("make_direct_gate", make_direct_gate, py::arg("name"), py::arg("key"), py::arg("slow"),
             py::arg("native"), py::arg("keyset"),
             "What stands for a matrix product, called without a keyset; or None.");
  module.def(
      "place_kernel", place_kernel, py::arg("name"), py::arg("key"), py::arg("slow"),
      py::arg("native"), py::arg("keyset"),
      "Put a kernel in C in the place of a matrix product. Returns what removes it, or None.");
  module.def("place_raising_kernel", place_raising_kernel, py::arg("space"), py::arg("name"),
             "Put a kernel that raises LookupError in place. Returns what removes it, or None.");
}

}  // namespace xpuruntime::bindings

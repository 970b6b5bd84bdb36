// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <array>
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bind.h"
#include "gil.h"
#include "operator_gate.h"
#include "plain_operator.h"
#include "sdpa_turn.h"
#include "tensor_layout.h"
#include "torch_library.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr std::array<std::string_view, 3> kKeys = {"CPU", "CUDA", "CompositeImplicitAutograd"};
constexpr std::size_t kMostKinds = 6;
constexpr std::size_t kSlots = kMostKinds * kKeys.size();

// Gates are never dropped, since a thread may still be inside one that has been taken away.
std::array<std::atomic<OperatorGate*>, kSlots> gates{};

// For `try_values`: its kernel is Python's.
constexpr OperatorKind kProbe = {{"passes", "toolfggbm", 3}, {}};

template <std::size_t kSlot>
void enter(TorchValue* values, std::uint64_t /*arguments*/, std::uint64_t /*results*/) {
  OperatorGate& gate = *gates[kSlot].load(std::memory_order_acquire);
  OperatorCall call(gate.signature(), values);
  gate.serve(call);
}

template <std::size_t... kSlot>
constexpr std::array<TorchKernel, kSlots> entries(std::index_sequence<kSlot...> /*all*/) {
  return {enter<kSlot>...};
}

constexpr auto kEntries = entries(std::make_index_sequence<kSlots>());

std::optional<std::size_t> slot_of(const OperatorKind& kind, std::string_view key) {
  for (std::size_t j = 0; j < kKeys.size(); ++j) {
    if (kKeys[j] != key) continue;
    const auto all = operator_kinds();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (&all[i] == &kind) return i * kKeys.size() + j;
    }
  }
  return std::nullopt;
}

void* function_of(const OperatorKind& kind, std::string_view key) {
  const std::string library(kind.library(key));
  return library.empty() ? nullptr : find_loaded(library.c_str(), kind.function(key).c_str());
}

const OperatorKind& kind_of(const std::string& name) {
  const OperatorKind* const kind = find_operator_kind(name);
  if (kind == nullptr) throw py::value_error("no kernel in C can stand for aten::" + name);
  return *kind;
}

std::string why_no_function(const std::string& name, const std::string& key) {
  const OperatorKind& kind = kind_of(name);
  if (torch_shim() == nullptr) return "PyTorch's C functions are not open";
  if (slot_of(kind, key) && function_of(kind, key) != nullptr) return "";
  return "this PyTorch has no C++ function of its kernel of aten::" + name + " at " + key;
}

py::object place_operator(const std::string& name, const std::string& key, const py::object& slow,
                          const py::object& keyset, const py::object& trial, bool plain) {
  const OperatorKind& kind = kind_of(name);
  const auto slot = slot_of(kind, key);
  void* const function = slot ? function_of(kind, key) : nullptr;
  if (torch_shim() == nullptr || function == nullptr) return py::none();
  if (OperatorGate* const before = gates[*slot].load(); before != nullptr) {
    before->renew(slow, trial);
  } else {
    gates[*slot].store(new OperatorGate(kind, function, slow, keyset, trial),
                       std::memory_order_release);
  }
  py::object below = open_torch_library("aten", key, name, kEntries[*slot]);
  if (below.is_none() || !plain) return below;
  return place_plain_operator(name, key, *gates[*slot].load(), below);
}

py::object run_operator(const std::string& name, const std::string& key, const py::args& values) {
  const OperatorKind& kind = kind_of(name);
  void* const function = function_of(kind, key);
  if (torch_shim() == nullptr || function == nullptr) {
    throw py::value_error(why_no_function(name, key));
  }
  OperatorCall call(kind.signature, values);
  {
    const ReleaseGil unlocked;
    kind.run(function, call);
  }
  return call.returned();
}

// A block of Python's, which no signal can leave without its end: there is no code of Python's
// between the beginning and the block.
class TurnBlock {
 public:
  explicit TurnBlock(SdpaWish wish) : wish_(wish) {}

  void enter() const {
    SdpaTurn::begin(wish_);
    if (PyErr_CheckSignals() == 0) return;  // that came while it waited
    SdpaTurn::end();
    throw py::error_already_set();
  }
  static void leave(const TurnBlock& /*self*/, const py::args& /*raised*/) { SdpaTurn::end(); }

 private:
  SdpaWish wish_;
};

// As words alone, so that tests can compare them.
py::object tensor_traits(const py::handle& tensor, bool ask) {
  if (torch_shim() == nullptr) throw py::value_error("PyTorch's C functions are not open");
  const TorchShim& torch = *torch_shim();
  if (PyObject_TypeCheck(tensor.ptr(), torch.type) == 0) throw py::type_error("not a tensor");
  TorchTensor handle = torch.tensor_of(tensor.ptr());
  TensorTraits found;
  if (!(ask ? ask_for_traits : read_traits)(torch, handle, found)) return py::none();
  py::list sizes;
  py::list strides;
  for (std::int64_t i = 0; i < found.rank; ++i) {
    sizes.append(found.sizes[i]);
    strides.append(found.strides[i]);
  }
  return py::make_tuple(sizes, strides, found.dtype, found.device, found.index, found.alignment);
}

py::object place_probe(const std::string& space, const py::object& slow) {
  std::atomic<OperatorGate*>& slot = gates[kSlots - 1];
  slot.store(new OperatorGate(kProbe, nullptr, slow, py::none(), py::none()));
  return open_torch_library(space.c_str(), "CPU", std::string(kProbe.signature.name),
                            kEntries[kSlots - 1]);
}

}  // namespace

void bind_operator_gate(py::module_& module) {
  module.def("tensor_traits", tensor_traits, py::arg("tensor"), py::arg("ask"),
             "What gates tell a tensor of PyTorch's from others by; `ask`: PyTorch's functions.");
  module.def("open_torch_values", open_torch_values,
             "Find PyTorch's C functions for what is no tensor. Returns what is against it.");
  module.def(
      "open_tensor_layout", open_tensor_layout, py::arg("plain_keys"),
      "Find where PyTorch's tensors have their shapes and keys. Returns what is against it.");
  module.def(
      "open_torch_state", open_torch_state,
      "Find what tells calls in one state of PyTorch's from others. Returns what is against it.");
  module.def("open_sdpa_switches", open_sdpa_switches,
             "Find PyTorch's switches for backends of attention. Returns what is against it.");
  py::class_<TurnBlock>(module, "SdpaTurn",
                        "A block that wants something of these switches; see sdpa_turn.h.")
      .def(py::init<SdpaWish>(), py::arg("wish"))
      .def("__enter__", &TurnBlock::enter)
      .def("__exit__", &TurnBlock::leave);
  module.def("in_sdpa_turn", SdpaTurn::within, "Whether this thread is in such a block.");
  module.def("why_no_function", why_no_function, py::arg("name"), py::arg("key"),
             "Why PyTorch's own kernel of an operator cannot be called by a C++ function.");
  module.def("run_operator", run_operator, py::arg("name"), py::arg("key"),
             "Call PyTorch's own kernel of an operator by its C++ function; arguments by place.");
  module.def("place_operator", place_operator, py::arg("name"), py::arg("key"), py::arg("slow"),
             py::arg("keyset"), py::arg("trial"), py::arg("plain"),
             "Put a kernel in C in an operator's place, and where it is to be `plain`, one over it "
             "that PyTorch calls without values of its interpreter; what removes all, or None.");
  module.def("place_probe", place_probe, py::arg("space"), py::arg("slow"),
             "Put a kernel in place that hands `slow` arguments of every kind, to see them.");
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "gate_state.h"
#include "operator_kind.h"
#include "tensor_layout.h"
#include "torch_cxx.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
using Attention = OneTensor (*)(const void*, const void*, const void*, const OptionalTensor&,
                                double, bool, std::optional<double>, bool);

enum Argument : std::uint8_t { kQuery, kKey, kValue, kMask, kDropout, kCausal, kScale, kGrouped };

// What PyTorch's C++ knows of a call beside its arguments; each compared with what Python says.
struct State {
  bool (*any_modes)(bool skip_own) = nullptr;
  bool (*requires_grad)(const void* tensor) = nullptr;
  const void* (*context)() = nullptr;
  bool (*deterministic)(const void* context) = nullptr;
};

State state;

std::uint32_t flags_of(const OperatorCall& call) {
  const double dropout = call.number(kDropout);
  const bool recording = torch_values().records_gradients();
  const auto needs = [&](std::size_t at) {
    return recording && call.tensor(at) != nullptr &&
           state.requires_grad(object_of(call.tensor(at)));
  };
  const std::uint32_t kind = dropout == 0 ? 0 : dropout < 1 ? 1 : 2;
  const auto bit = [](bool value, unsigned at) { return (value ? 1U : 0U) << at; };
  return kind | bit(call.flag(kCausal), 2) | bit(call.flag(kGrouped), 3) |
         bit(needs(kQuery) || needs(kKey) || needs(kValue), 4) | bit(needs(kMask), 5) |
         bit(state.deterministic(state.context()), 6);
}

bool describe(const OperatorCall& call, CallFacts& facts) {
  if (state.any_modes(false)) return false;
  for (const std::size_t at : {kQuery, kKey, kValue, kMask}) {
    if (call.tensor(at) != nullptr && !is_plain(call.tensor(at))) return false;
  }
  const TorchShim& torch = *torch_shim();
  return facts.add(flags_of(call)) && facts.add(torch, call.tensor(kQuery)) &&
         facts.add(torch, call.tensor(kKey)) && facts.add(torch, call.tensor(kValue)) &&
         (call.tensor(kMask) == nullptr || facts.add(torch, call.tensor(kMask)));
}

// As xpuruntime.pytorch.overriding.attention writes it.
std::string mark(const OperatorCall& call) { return "sdpa;" + std::to_string(flags_of(call)); }

void run(void* function, OperatorCall& call) {
  const auto made = reinterpret_cast<Attention>(function)(
      call.tensor(kQuery), call.tensor(kKey), call.tensor(kValue),
      OptionalTensor(call.tensor(kMask)), call.number(kDropout), call.flag(kCausal),
      call.optional_number(kScale), call.flag(kGrouped));
  call.give(0, made.handle());
}

PyObject* imported(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// Of a call whose gradient nobody asks for, and that drops nothing.
bool run_ours(PyObject* place, std::span<const py::object> given, OperatorCall& call) {
  static PyObject* const op = imported("xpuruntime._core", "op_attention");
  static PyObject* const empty_like = imported("torch", "empty_like");
  static PyObject* const transforms = imported("xpuruntime.pytorch.attention.limits", "transforms");
  static PyObject* const top_left = py::str("top_left").release().ptr();
  // What maps or differentiates the call looks on in Python.
  const auto looking = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(transforms));
  if (!looking) throw py::error_already_set();
  if (py::len(looking) > 0) return false;
  const auto out =
      py::reinterpret_steal<py::object>(PyObject_CallOneArg(empty_like, given[kQuery].ptr()));
  if (!out) throw py::error_already_set();
  const py::float_ no_dropout(0.0);
  // place, q, k, v, mask, rng, out, want_lse, causal, scale, dropout_p, phase, stream
  const std::array<PyObject*, 13> all = {place,
                                         given[kQuery].ptr(),
                                         given[kKey].ptr(),
                                         given[kValue].ptr(),
                                         given[kMask].ptr(),
                                         Py_None,
                                         out.ptr(),
                                         Py_False,
                                         call.flag(kCausal) ? top_left : Py_False,
                                         given[kScale].ptr(),
                                         no_dropout.ptr(),
                                         phase_argument(),
                                         Py_None};
  if (!call_core(op, all)) return false;
  TorchTensor made = nullptr;
  const TorchShim& torch = *torch_shim();
  if (torch.copy_handle(torch.tensor_of(out.ptr()), &made) != 0) {
    throw std::runtime_error("PyTorch makes no handle of a tensor");
  }
  call.give(0, made);
  return true;
}

std::string_view library_of(std::string_view key) {
  return key == "CompositeImplicitAutograd" ? "libtorch_cpu.so" : "";
}

std::string function_of(std::string_view /*key*/) {
  return "_ZN2at25compositeimplicitautograd28scaled_dot_product_attentionERKNS_6TensorES3_S3_"
         "RKSt8optionalIS1_EdbS4_IdEb";
}

}  // namespace

std::string open_torch_state() {
  if (torch_shim() == nullptr) return "PyTorch's C functions are not open";
  State found;
  const auto take = [](auto& function, const char* library, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(find_loaded(library, name));
    return function != nullptr ? "" : name;
  };
  for (const std::string_view lacking :
       {take(found.any_modes, "libc10.so", "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb"),
        take(found.requires_grad, "libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv"),
        take(found.context, "libtorch_cpu.so", "_ZN2at13globalContextEv"),
        take(found.deterministic, "libtorch_cpu.so",
             "_ZNK2at7Context23deterministicAlgorithmsEv")}) {
    if (!lacking.empty()) return "this PyTorch has no " + std::string(lacking);
  }
  const py::module_ torch = py::module_::import("torch");
  const py::object core = torch.attr("_C");
  if (found.any_modes(false) != (core.attr("_len_torch_dispatch_stack")().cast<int>() > 0) ||
      found.deterministic(found.context()) !=
          core.attr("_get_deterministic_algorithms")().cast<bool>()) {
    return "this PyTorch's C++ functions do not say of a thread what Python does";
  }
  for (const bool required : {false, true}) {
    const py::object tensor =
        torch.attr("ones")(2, py::arg("device") = "cpu", py::arg("requires_grad") = required);
    if (found.requires_grad(object_of(torch_shim()->tensor_of(tensor.ptr()))) != required) {
      return "this PyTorch's C++ functions do not say of a tensor what Python does";
    }
  }
  state = found;
  return "";
}

const OperatorKind& sdpa_kind() {
  using namespace std::string_view_literals;
  static const OperatorKind kind = {
      {"scaled_dot_product_attention", "tttofbgb", 1, {"scale", "enable_gqa"}},
      "\0\1\2\3"sv,
      nullptr,
      library_of,
      function_of,
      run,
      describe,
      mark,
      run_ours,
      true};
  return kind;
}

}  // namespace xpuruntime::bindings

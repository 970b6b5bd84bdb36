// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <ATen/Context.h>
#include <ATen/DLConvertor.h>
#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/version.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#endif

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "guard.h"

namespace xpuruntime::torch_addon {
namespace {

const torch_abi::GuardFunctions* functions = nullptr;

// --- what PyTorch knows

bool records_gradients() { return at::GradMode::is_enabled(); }

std::int64_t running_backward() { return torch::autograd::get_current_graph_task_id(); }

bool running_node(std::uint64_t* number, std::uint64_t* thread) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  *number = node->sequence_nr();
  *thread = node->thread_id();
  return true;
}

void read_backends(bool* enabled) {
  const at::Context& context = at::globalContext();
  enabled[0] = context.userEnabledMathSDP();
  enabled[1] = context.userEnabledFlashSDP();
  enabled[2] = context.userEnabledMemEfficientSDP();
  enabled[3] = context.userEnabledCuDNNSDP();
  enabled[4] = context.userEnabledOverrideableSDP();
}

void write_backend(std::size_t backend, bool enabled) {
  at::Context& context = at::globalContext();
  switch (backend) {
    case 0:
      return context.setSDPUseMath(enabled);
    case 1:
      return context.setSDPUseFlash(enabled);
    case 2:
      return context.setSDPUseMemEfficient(enabled);
    case 3:
      return context.setSDPUseCuDNN(enabled);
    default:
      return context.setSDPUseOverrideable(enabled);
  }
}

PyObject* empty_like(PyObject* like, std::size_t rank, const std::int64_t* sizes,
                     const std::int64_t* strides, std::uint8_t code, std::uint8_t bits,
                     void** data) {
  HANDLE_TH_ERRORS
  const at::Tensor& model = THPVariable_Unpack(like);
  const auto dtype = at::toScalarType(DLDataType{code, bits, 1});
  const at::Tensor made =
      at::empty_strided({sizes, rank}, {strides, rank}, model.options().dtype(dtype));
  *data = made.mutable_data_ptr();
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS
}

constexpr torch_abi::AddonFunctions kFunctions = {
    torch_abi::kVersion,
    sizeof(torch_abi::AddonFunctions),
    records_gradients,
    running_backward,
    at::sequence_number::peek,
    at::RecordFunction::currentThreadId,
    running_node,
    read_backends,
    write_backend,
    empty_like,
};

// --- placing kernels

struct Slot {
  Guard guard;
  std::optional<c10::KernelFunction> kernel;
};

py::object place(const std::string& name, const std::string& key, const py::object& slow,
                 const py::object& keyset) {
  static auto& slots = *new std::map<std::pair<std::string, std::string>, Slot>;
  const c10::DispatchKey at = c10::parseDispatchKey(key);
  const auto [found, is_new] = slots.try_emplace({name, key});
  Slot& slot = found->second;
  if (is_new) slot.kernel = kernel_for(name, at, slot.guard);
  if (!slot.kernel) return py::none();
  slot.guard.slow = slow;
  slot.guard.keyset = keyset;
  slot.guard.number.store(functions->next_guard(), std::memory_order_release);
  const auto dot = name.find('.');
  const c10::OperatorName op("aten::" + name.substr(0, dot),
                             dot == std::string::npos ? "" : name.substr(dot + 1));
  auto placed =
      std::make_shared<c10::RegistrationHandleRAII>(c10::Dispatcher::singleton().registerImpl(
          op, at, *slot.kernel, std::nullopt, nullptr, "registered by xpuruntime"));
  return py::cpp_function([placed]() mutable { placed.reset(); });
}

}  // namespace

const torch_abi::GuardFunctions& core() { return *functions; }

PYBIND11_MODULE(_torch_addon, module) {
  const py::object capsule = py::module_::import("xpuruntime._core").attr("torch_guards")();
  functions = static_cast<const torch_abi::GuardFunctions*>(
      PyCapsule_GetPointer(capsule.ptr(), torch_abi::kCoreCapsule));
  if (functions == nullptr) throw py::error_already_set();
  if (functions->version != torch_abi::kVersion ||
      functions->size != sizeof(torch_abi::GuardFunctions)) {
    throw py::import_error("the addon for PyTorch was built for another xpuruntime._core");
  }
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("functions") = py::reinterpret_steal<py::object>(PyCapsule_New(
      const_cast<torch_abi::AddonFunctions*>(&kFunctions), torch_abi::kAddonCapsule, nullptr));
  module.def("place", place, py::arg("name"), py::arg("key"), py::arg("slow"), py::arg("keyset"),
             "Put a kernel in C++ over PyTorch's own. Returns what removes it, or None where the "
             "addon has none for this operator and dispatch key.");
}

}  // namespace xpuruntime::torch_addon

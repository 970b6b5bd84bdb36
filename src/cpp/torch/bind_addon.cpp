// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <atomic>
#include <span>

#include "addon_functions.h"
#include "bind.h"
#include "guard_state.h"
#include "sdp_backend_scope.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

std::atomic<const torch_abi::AddonFunctions*> in_use{nullptr};

using Facts = std::span<const std::uint64_t>;

bool find_native(const std::uint64_t* facts, std::size_t count, std::uint64_t* request) {
  if (!facts_decide()) return false;
  const SdpBackendRequest* const found = native_calls().find(Facts(facts, count));
  if (found == nullptr) return false;
  *request = *found;
  return true;
}

torch_abi::Verdict judge_call(PyObject* name, PyObject* const* arrays, std::size_t count,
                              PyObject* out, const char* phase, PyObject** place,
                              std::uint64_t* request) {
  try {
    const CallPhase fixed = phase == nullptr ? CallPhase::kUnknown : phase_of(phase);
    Judgement found = judge(name, {arrays, count}, out, fixed, request != nullptr);
    if (found.verdict == Verdict::kQuick) *place = found.place.release().ptr();
    if (request != nullptr) *request = found.request;
    return static_cast<torch_abi::Verdict>(found.verdict);
  } catch (...) {
    set_python_error();
    return torch_abi::kError;
  }
}

constexpr torch_abi::GuardFunctions kFunctions = {
    torch_abi::kVersion,
    sizeof(torch_abi::GuardFunctions),
    next_guard_number,
    first_fact,
    find_native,
    state_number,
    SdpBackendScope::begin,
    SdpBackendScope::end,
    [](const std::uint64_t* facts, std::size_t count) { return quick_place(Facts(facts, count)); },
    judge_call,
    [](const std::uint64_t* facts, std::size_t count, std::uint64_t number, std::uint64_t request) {
      keep_native_call(Facts(facts, count), number, request);
    },
    [](const std::uint64_t* facts, std::size_t count, PyObject* place, std::uint64_t number) {
      keep_quick_call(Facts(facts, count), place, number);
    },
    phase_argument,
};

void use_addon(const py::object& capsule) {
  if (capsule.is_none()) {
    in_use.store(nullptr, std::memory_order_release);
    return;
  }
  const auto* const found = static_cast<const torch_abi::AddonFunctions*>(
      PyCapsule_GetPointer(capsule.ptr(), torch_abi::kAddonCapsule));
  if (found == nullptr) throw py::error_already_set();
  if (found->version != torch_abi::kVersion || found->size != sizeof(torch_abi::AddonFunctions)) {
    throw py::import_error("this addon for PyTorch was built for another xpuruntime._core");
  }
  in_use.store(found, std::memory_order_release);
}

}  // namespace

const torch_abi::AddonFunctions* addon() noexcept { return in_use.load(std::memory_order_acquire); }

void bind_addon(py::module_& module) {
  module.def(
      "torch_guards",
      [] {
        return py::reinterpret_steal<py::object>(PyCapsule_New(
            const_cast<torch_abi::GuardFunctions*>(&kFunctions), torch_abi::kCoreCapsule, nullptr));
      },
      "The functions that the addon for PyTorch calls, in a capsule; see addon_abi.h.");
  module.def("use_torch_addon", use_addon, py::arg("functions"),
             "Take what PyTorch knows from the addon with these functions; None: from Python.");
}

}  // namespace xpuruntime::bindings

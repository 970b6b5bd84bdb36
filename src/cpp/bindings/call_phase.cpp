// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_phase.h"

#include <array>
#include <stdexcept>
#include <vector>

#include "python_depth.h"
#include "stated_call.h"
#include "torch_shim.h"

namespace xpuruntime::bindings {
namespace {

constexpr const char* kLibrary = "libtorch_cpu.so";
constexpr const char* kRecords = "aoti_torch_grad_mode_is_enabled";
// torch::autograd::get_current_graph_task_id(), which torch._C has, too.
constexpr const char* kTask = "_ZN5torch8autograd25get_current_graph_task_idEv";

struct Functions {
  bool (*records_gradients)() = nullptr;
  int (*graph_task)() = nullptr;  // the backward that runs in this thread, or -1
};

Functions functions;

struct Function {
  CallPhase phase = CallPhase::kUnknown;
  std::int64_t backward = -1;  // that it was called in
  const PyThreadState* state = nullptr;
  int depth = 0;  // it has ended where the thread is less deep, also where nobody has said so
};

thread_local std::vector<Function> called_functions;

}  // namespace

std::string open_phases() {
  Functions found;
  found.records_gradients = reinterpret_cast<bool (*)()>(find_loaded(kLibrary, kRecords));
  found.graph_task = reinterpret_cast<int (*)()>(find_loaded(kLibrary, kTask));
  if (found.records_gradients == nullptr) return std::string("this PyTorch has no ") + kRecords;
  if (found.graph_task == nullptr) return std::string("this PyTorch has no ") + kTask;
  functions = found;
  return "";
}

CallPhase call_phase() noexcept {
  if (const CallPhase stated = stated_call().phase; stated != CallPhase::kUnknown) return stated;
  if (functions.graph_task == nullptr) return CallPhase::kUnknown;
  if (functions.records_gradients()) return CallPhase::kTrain;
  const std::int64_t backward = running_backward();
  if (const CallPhase phase = function_phase(backward); phase != CallPhase::kUnknown) return phase;
  return backward == -1 ? CallPhase::kInfer : CallPhase::kBackward;
}

bool runs_backward() noexcept { return running_backward() != -1; }

std::int64_t running_backward() noexcept {
  return functions.graph_task == nullptr ? -1 : functions.graph_task();
}

void enter_function(CallPhase phase, std::int64_t backward) {
  const PyThreadState* const state = PyThreadState_Get();
  called_functions.push_back({phase, backward, state, depth_of(state)});
}

void leave_function() noexcept {
  if (!called_functions.empty()) called_functions.pop_back();
}

CallPhase function_phase(std::int64_t backward) noexcept {
  const auto ended = [](const Function& one) { return depth_of(one.state) < one.depth; };
  while (!called_functions.empty() && ended(called_functions.back())) called_functions.pop_back();
  if (called_functions.empty() || called_functions.back().backward != backward) {
    return CallPhase::kUnknown;
  }
  return called_functions.back().phase;
}

std::string_view phase_name(CallPhase phase) noexcept {
  switch (phase) {
    case CallPhase::kTrain:
      return "train";
    case CallPhase::kBackward:
      return "backward";
    case CallPhase::kInfer:
      return "infer";
    case CallPhase::kUnknown:
      break;
  }
  return "";
}

CallPhase phase_of(std::string_view name) {
  constexpr std::array kPhases = {CallPhase::kUnknown, CallPhase::kTrain, CallPhase::kBackward,
                                  CallPhase::kInfer};
  for (const CallPhase phase : kPhases) {
    if (phase_name(phase) == name) return phase;
  }
  throw std::invalid_argument("a phase is 'train', 'backward', 'infer' or '', not '" +
                              std::string(name) + "'");
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_phase.h"

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "addon_functions.h"
#include "annotated_call.h"
#include "python_depth.h"
#include "python_names.h"

namespace xpuruntime::bindings {
namespace {

struct Function {
  CallPhase phase = CallPhase::kUnknown;
  std::int64_t backward = -1;  // that it was called in
  const PyThreadState* state = nullptr;
  int depth = 0;  // it has ended where the thread is less deep, also where nobody has said so
};

thread_local std::vector<Function> called_functions;
thread_local CallPhase generation = CallPhase::kUnknown;

// Which part of generation an inference is, where it is one.
CallPhase refined(CallPhase phase) noexcept {
  const bool generates = phase == CallPhase::kInfer && generation != CallPhase::kUnknown;
  return generates ? generation : phase;
}

// Where none is stated.
CallPhase phase_in(bool records, std::int64_t backward) noexcept {
  if (records) return CallPhase::kTrain;
  if (const CallPhase phase = function_phase(backward); phase != CallPhase::kUnknown) return phase;
  return backward == -1 ? CallPhase::kInfer : CallPhase::kBackward;
}

}  // namespace

CallPhase call_phase() noexcept {
  if (const CallPhase stated = annotated_call().phase; stated != CallPhase::kUnknown) {
    return refined(stated);
  }
  const auto* const torch = addon();
  if (torch == nullptr) return CallPhase::kUnknown;
  return refined(phase_in(torch->records_gradients(), torch->running_backward()));
}

CallPhase call_phase_with_gil() {
  if (addon() != nullptr) return call_phase();
  if (const CallPhase stated = annotated_call().phase; stated != CallPhase::kUnknown) {
    return refined(stated);
  }
  return refined(phase_in(records_gradients(), running_backward_with_gil()));
}

bool runs_backward() noexcept { return running_backward() != -1; }

std::int64_t running_backward() noexcept {
  const auto* const torch = addon();
  return torch == nullptr ? -1 : torch->running_backward();
}

std::int64_t running_backward_with_gil() {
  if (addon() != nullptr) return running_backward();
  static PyObject* const task = private_api("running_backward");
  return called(task).cast<std::int64_t>();
}

bool records_gradients() {
  if (const auto* const torch = addon()) return torch->records_gradients();
  static PyObject* const function = imported("torch", "is_grad_enabled");
  return called(function).ptr() == Py_True;
}

CallPhase set_generation_phase(CallPhase phase) noexcept {
  return std::exchange(generation, phase);
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
    case CallPhase::kPrefill:
      return "prefill";
    case CallPhase::kDecode:
      return "decode";
    case CallPhase::kUnknown:
      break;
  }
  return "";
}

PyObject* phase_text(CallPhase phase) {
  static const std::array<PyObject*, 6> texts = [] {
    std::array<PyObject*, 6> made{};
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = interned(std::string(phase_name(static_cast<CallPhase>(i))).c_str());
    }
    return made;
  }();
  return texts[static_cast<std::size_t>(phase)];
}

CallPhase phase_of(std::string_view name) {
  constexpr std::array kPhases = {CallPhase::kUnknown, CallPhase::kTrain,   CallPhase::kBackward,
                                  CallPhase::kInfer,   CallPhase::kPrefill, CallPhase::kDecode};
  for (const CallPhase phase : kPhases) {
    if (phase_name(phase) == name) return phase;
  }
  throw std::invalid_argument(
      "a phase is 'train', 'backward', 'infer', 'prefill', 'decode' or '', not '" +
      std::string(name) + "'");
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "gate_state.h"
#include "operator_kind.h"
#include "sdpa_turn.h"

namespace xpuruntime::bindings {

/// Before an operator that takes more than tensors, as a kernel in C: calls PyTorch's own C++
/// function where the route of the call is known and native, without Python; a kernel of ours that
/// needs nothing but the arrays with the GIL alone; and asks Python otherwise.
class OperatorGate {
 public:
  /// `function`: PyTorch's. `slow`: called with `keyset`, then the operator's arguments. `trial`:
  /// called with the GIL before PyTorch's function is called first; gives why it is not to be
  /// called, nothing, or None where that cannot be found out now.
  OperatorGate(const OperatorKind& kind, void* function, pybind11::object slow,
               pybind11::object keyset, pybind11::object trial);

  /// Stands before the operator anew. With the GIL.
  void renew(pybind11::object slow, pybind11::object trial);

  const OperatorSignature& signature() const noexcept { return kind_.signature; }
  /// PyTorch's, which may be called for what is `known`, in a turn where calls take these.
  void* function() const noexcept { return function_; }
  bool takes_turns() const noexcept { return kind_.takes_turns; }
  /// The first word of the facts of a call that runs now.
  std::uint64_t number() const noexcept { return first_fact(number_); }
  /// Whether a call's route depends on nothing but facts, which are added. Needs no GIL.
  bool sees(const OperatorCall& call, CallFacts& facts) const {
    return kind_.describe != nullptr && kind_.describe(call, facts);
  }
  /// What the native kernel wants of PyTorch's switches, where it is known to serve a call; only
  /// kinds that take turns want something. Needs no GIL.
  std::optional<SdpaWish> known(const CallFacts& facts) const;
  /// Does one call. Throws what PyTorch's function throws, and py::error_already_set.
  void serve(OperatorCall& call);
  /// Does one that it does not know. `facts` is null where the call cannot be seen. Takes the GIL.
  /// Throws as above.
  void ask(OperatorCall& call, const CallFacts* facts);
  void ask_python(OperatorCall& call, const CallFacts* facts);

 private:
  enum class Trial : std::uint8_t { kOpen, kPassed, kFailed };

  void run(OperatorCall& call, SdpaWish wish) const;
  /// Whether the call was done without Python. `given`: its arguments as Python has them, no lists.
  bool decide(OperatorCall& call, const CallFacts& facts, std::span<const pybind11::object> given);
  Verdict judge_call(const OperatorCall& call, std::span<const pybind11::object> given,
                     pybind11::object* place, SdpaWish* wish) const;
  void try_function();
  void call_python(OperatorCall& call, std::span<const pybind11::object> given);

  const OperatorKind& kind_;
  void* function_;
  pybind11::object slow_;
  pybind11::object keyset_;
  pybind11::object trial_;
  std::atomic<std::uint64_t> number_;
  std::atomic<Trial> tried_{Trial::kOpen};
};

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "call_facts.h"
#include "operator_call.h"

namespace xpuruntime::bindings {

/// What a gate has to know of one operator.
struct OperatorKind {
  OperatorSignature signature;
  /// Which arguments are the arrays of a route's key.
  std::string_view arrays;
  /// Phase of every call of it, or null where the circumstances of a call say it.
  const char* phase = nullptr;

  /// Library and mangled name of PyTorch's own C++ function behind a dispatch key, which runs the
  /// kernel that the dispatcher would; empty where it has none.
  std::string_view (*library)(std::string_view key) = nullptr;
  std::string (*function)(std::string_view key) = nullptr;
  /// Calls that function, and gives its results to the call. Needs no GIL. Throws what PyTorch
  /// throws.
  void (*run)(void* function, OperatorCall& call) = nullptr;

  /// Adds all that its route depends on. False where Python has to look at the call. Needs no GIL.
  bool (*describe)(const OperatorCall& call, CallFacts& facts) = nullptr;
  /// What stands before the arrays in the key of its route. With the GIL.
  std::string (*mark)(const OperatorCall& call) = nullptr;
  /// By a kernel of ours at a place, on Python's objects of the arguments, of which lists are none;
  /// null where Python always does that. False with nothing done where Python has to. With the GIL.
  bool (*run_ours)(PyObject* place, std::span<const pybind11::object> arguments,
                   OperatorCall& call) = nullptr;
  /// Whether PyTorch's switches say which of its kernels serves, so that calls take turns.
  bool takes_turns = false;
};

/// All operators that a gate of this kind can stand for.
std::span<const OperatorKind> operator_kinds();
const OperatorKind* find_operator_kind(std::string_view name);

std::span<const OperatorKind> norm_kinds();
const OperatorKind& sdpa_kind();

/// What a function of our core returns; nothing where it refuses the call, since Python sees to
/// what is refused. With the GIL. Throws py::error_already_set for what ends the program.
pybind11::object call_core(PyObject* function, std::span<PyObject* const> values);

/// Opens what `sdpa_kind` reads of PyTorch beside the arguments and the layout of tensors. With the
/// GIL. Returns what is against it, or nothing.
std::string open_torch_state();

}  // namespace xpuruntime::bindings

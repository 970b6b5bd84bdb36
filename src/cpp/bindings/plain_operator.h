// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "operator_gate.h"

namespace xpuruntime::bindings {

/// Puts a function that PyTorch calls as it calls its own kernels, with the arguments themselves,
/// over a gate that stands in an operator's place, which `below` takes away. It calls the gate's
/// function of PyTorch's where the gate knows a call to be native, and asks the gate otherwise.
/// Returns what removes both; `below` itself where no form of the operator is known. With the GIL,
/// once the dispatcher is open. Throws std::runtime_error in PyTorch's words.
pybind11::object place_plain_operator(const std::string& name, const std::string& key,
                                      OperatorGate& gate, const pybind11::object& below);

}  // namespace xpuruntime::bindings

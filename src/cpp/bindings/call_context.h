// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include "xpuruntime/dispatcher.h"

namespace xpuruntime::bindings {

/// Where a call of an operation stands: the site of its policy, and what the policy says beyond
/// kernels. `_core.CallContext` in Python, from which xpuruntime.ops.call_context derives its own.
/// Immutable.
struct CallContext {
  pybind11::object site_object;  // keeps the site alive
  CallSite* site = nullptr;
  bool allow_tf32 = false;
  bool deterministic = false;
  /// The caller is a kernel below autograd: arrays that require a gradient are taken.
  bool below_autograd = false;
};

/// The context in a Python object. The last one is remembered, and kept, since most calls of a
/// program come from one place. Valid until the next call. Throws TypeError for anything else.
/// Call with the GIL.
const CallContext& call_context(PyObject* object);

void bind_call_context(pybind11::module_& module);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/call_table.h"

namespace xpuruntime::bindings {

/// What may be done with a call before Python has looked at it.
enum class Verdict : std::uint8_t {
  kAsk,     ///< Python decides
  kNative,  ///< the native kernel serves
  kAlways   ///< the native kernel serves all calls whose arrays look like these
};

/// What holds for all gates: the routes of the policy, and whether Python looks at every call. With
/// the GIL.
void set_gate_state(const pybind11::object& routes, bool slow);
/// Forgets which calls are native, since a route has changed. With the GIL.
void forget_native_calls() noexcept;

/// Whether Python looks at every call. Without the GIL, too.
bool every_call_is_asked() noexcept;
/// What this thread knows to be native under the policy that holds now. Without the GIL, too.
CallTable& native_calls();

/// `names` as of a vectorcall. With the GIL. Throws py::error_already_set.
Verdict judge(PyObject* name, PyObject* const* arrays, Py_ssize_t count, PyObject* names);

/// Calls `native.call`, or `native` where its kernel has been taken away. With the GIL; null with
/// an error set.
PyObject* call_native(PyObject* native, PyObject* const* values, std::size_t count,
                      PyObject* names);

}  // namespace xpuruntime::bindings

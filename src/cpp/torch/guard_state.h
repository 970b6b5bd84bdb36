// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>

#include "call_phase.h"
#include "core/dispatch/call_table.h"
#include "sdp_backend_scope.h"

namespace xpuruntime::bindings {

/// What may be done with a call before Python has looked at it.
enum class Verdict : std::uint8_t {
  kAsk,     ///< Python decides
  kNative,  ///< the native kernel serves
  kQuick,   ///< an xpuruntime kernel serves, and needs nothing but the arrays
  kAlways   ///< the native kernel serves all calls of the same facts
};

/// What holds for all guards: the routes of the policy, those for all lengths of a kind of
/// attention, whether Python looks at every call, and whether rules ask for the phase of a call,
/// and for its module. With the GIL.
void set_guard_state(const pybind11::object& routes, const pybind11::object& kinds, bool slow,
                     bool phases, bool modules);
/// Forgets which calls are native, since a route has changed. With the GIL.
void forget_native_calls() noexcept;

/// A number that no guard has had before.
std::uint64_t next_guard_number() noexcept;
/// Whether facts alone decide which kernel serves a call. Without the GIL, too.
bool facts_decide() noexcept;
/// The first word of the facts of a call: the number of its guard, and its phase and module where
/// rules ask for these. Without the GIL, too.
std::uint64_t first_fact(std::uint64_t guard) noexcept;
/// What xpuruntime operations take as the phase of the call that runs, where rules ask for one: a
/// text, else None. Borrowed, with the GIL.
PyObject* phase_argument();
/// What this thread knows to be native under the policy that holds now. Without the GIL, too.
CallTable& native_calls();
/// Where the xpuruntime kernel is that this thread knows to serve a call that is kQuick, or null: a
/// Place, which lives while the GIL is held. With the GIL.
PyObject* quick_place(std::span<const std::uint64_t> call);
/// Another one whenever what threads know is void. Without the GIL, too.
std::uint64_t state_number() noexcept;
/// Keeps a call that was judged to be kAlways since `number` was read, unless another state holds
/// by now, and what it wants of PyTorch's switches. With the GIL.
void keep_native_call(std::span<const std::uint64_t> call, std::uint64_t number,
                      SdpBackendRequest request = kAsSet);
/// Keeps a call that was judged to be kQuick, as above.
void keep_quick_call(std::span<const std::uint64_t> call, PyObject* place, std::uint64_t number);

/// What may be done with a call, and what that takes.
struct Judgement {
  Verdict verdict = Verdict::kAsk;
  /// Of the xpuruntime kernel, where it is kQuick.
  pybind11::object place;
  /// What xpuruntime operations take as the phase of the call: a text where rules ask for one, else
  /// None. Borrowed.
  PyObject* phase = Py_None;
  /// What the native kernel wants of PyTorch's switches.
  SdpBackendRequest request = kAsSet;
};

/// `out`: where the result goes, or null. `phase`: of every call of this operator, where rules ask
/// for one; kUnknown where it is that of the call. `attention`: its route may be that of all
/// lengths, so that the kernel may refuse. With the GIL. Throws py::error_already_set.
Judgement judge(PyObject* name, std::span<PyObject* const> arrays, PyObject* out,
                CallPhase phase = CallPhase::kUnknown, bool attention = false);

/// Calls `native.call`, or `native` where its kernel has been taken away. With the GIL; null with
/// an error set.
PyObject* call_native(PyObject* native, PyObject* const* values, std::size_t count,
                      PyObject* names);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>

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

/// What holds for all guards: the routes of the policy, whether Python looks at every call, and
/// what gives the rest of a route's key, the phase of the call and its module, where shapes alone
/// do not decide it; or none. `phases`, `modules`: what of that rest rules ask for, where
/// call_phase and call_module tell all of it. With the GIL.
void set_guard_state(const pybind11::object& routes, bool slow,
                     const pybind11::object& circumstances, bool phases, bool modules);
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

/// `out`: where the result goes, or null. With the GIL. `place`, where it is given, becomes the
/// Place of an xpuruntime kernel that is quick; where it is not, Python is asked for these.
/// `phase`: of every call of this operator, where rules ask for one; null where the circumstances
/// of the call say it. `request`, where it is given, becomes what the native kernel wants of
/// PyTorch's switches; where it is not, Python is asked for what wants something of them. Throws
/// py::error_already_set.
Verdict judge(PyObject* name, std::span<PyObject* const> arrays, PyObject* out,
              pybind11::object* place = nullptr, const char* phase = nullptr,
              SdpBackendRequest* request = nullptr);

/// Calls `native.call`, or `native` where its kernel has been taken away. With the GIL; null with
/// an error set.
PyObject* call_native(PyObject* native, PyObject* const* values, std::size_t count,
                      PyObject* names);

}  // namespace xpuruntime::bindings

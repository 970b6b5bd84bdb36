// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "sdp_backend_scope.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "addon_functions.h"
#include "core/shared_mode_lock.h"
#include "gil.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

using torch_abi::kBackends;

// Python's functions that read and write them, by the number of a backend, where there is no addon.
struct PythonSwitches {
  std::array<PyObject*, kBackends> read{};
  std::array<PyObject*, kBackends> write{};
};

PythonSwitches python;

using Enabled = std::array<bool, kBackends>;

// While a scope has the switches otherwise than the program has set them.
struct Kept {
  Enabled before{};
  Enabled during{};
  bool changed = false;
};

Kept kept;

// With the GIL where there is no addon: functions in C, which give it to nobody meanwhile.
Enabled read() {
  Enabled found{};
  if (const auto* const torch = addon()) {
    torch->read_backends(found.data());
    return found;
  }
  const py::error_scope kept_error;
  for (std::size_t i = 0; i < kBackends; ++i) {
    const auto value = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(python.read[i]));
    found[i] = value.ptr() == Py_True;
  }
  return found;
}

void write_one(std::size_t backend, bool value) {
  if (const auto* const torch = addon()) return torch->write_backend(backend, value);
  const py::error_scope kept_error;
  py::reinterpret_steal<py::object>(
      PyObject_CallOneArg(python.write[backend], value ? Py_True : Py_False));
}

// Those to be enabled first, so that threads that go past the override never find none.
void write(const Enabled& enabled) {
  for (const bool value : {true, false}) {
    for (std::size_t i = 0; i < kBackends; ++i) {
      if (enabled[i] == value) write_one(i, value);
    }
  }
}

void come(SdpBackendRequest request) {
  const std::size_t only = request & (kOnlyIfEnabled - 1);
  if (only == 0) return;
  kept.before = read();
  if ((request & kOnlyIfEnabled) != 0 && !kept.before[only - 1]) return;
  kept.during = {};
  kept.during[only - 1] = true;
  kept.changed = true;
  write(kept.during);
}

void go() {
  if (!kept.changed) return;
  Enabled enabled = read();
  for (std::size_t i = 0; i < kBackends; ++i) {
    if (enabled[i] == kept.during[i]) enabled[i] = kept.before[i];
  }
  write(enabled);
  kept.changed = false;
}

// Of this thread, each inside of the one before it.
struct Scope {
  SdpBackendRequest request = kAsSet;
  bool own = false;  // else it shares in what surrounds it
};

thread_local std::vector<Scope> scopes;

// The innermost that is no sharer, which is in.
const Scope* holder() {
  const auto found =
      std::find_if(scopes.rbegin(), scopes.rend(), [](const Scope& t) { return t.own; });
  return found == scopes.rend() ? nullptr : &*found;
}

// Scopes that are open, where Python's functions set the switches: the GIL guards it. The lock
// below calls nothing then, since a thread that has the GIL may wait for that lock.
std::size_t in_python = 0;

SharedModeLock& lock() {
  // Never dropped, since threads may outlive statics.
  static SharedModeLock& made = *new SharedModeLock(
      [](SdpBackendRequest request) {
        if (addon() != nullptr) come(request);
      },
      [](SdpBackendRequest /*request*/) {
        if (addon() != nullptr) go();
      });
  static const int registered =
      pthread_atfork([] { made.before_fork(); }, [] { made.after_fork(); },
                     [] { made.after_fork_in_child(SdpBackendScope::within()); });
  static_cast<void>(registered);
  return made;
}

// PyGILState_Check says yes to everything once the process has made another interpreter.
bool has_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const now = PyThreadState_GetUnchecked();
#else
  PyThreadState* const now = _PyThreadState_UncheckedGet();
#endif
  return now != nullptr && now == PyGILState_GetThisThreadState();
}

void wait_for(SdpBackendRequest request) {
  if (lock().try_enter(request)) return;
  if (!has_gil()) {
    lock().enter(request);
    return;
  }
  const ReleaseGil unlocked;
  lock().enter(request);
}

void enter(SdpBackendRequest request) {
  wait_for(request);
  if (addon() == nullptr && in_python++ == 0) come(request);
}

void leave() {
  if (addon() == nullptr && --in_python == 0) go();
  lock().leave();
}

}  // namespace

void SdpBackendScope::begin(SdpBackendRequest request) {
  const Scope* const outer = holder();
  if (outer != nullptr && (request == kAsSet || request == outer->request)) {
    scopes.push_back({request, false});
    return;
  }
  if (outer != nullptr) leave();
  enter(request);
  scopes.push_back({request, true});
}

// NOLINTNEXTLINE(bugprone-exception-escape): where a lock fails, the program is over.
void SdpBackendScope::end() noexcept {
  if (scopes.empty()) return;
  const bool own = scopes.back().own;
  scopes.pop_back();
  if (!own) return;
  leave();
  if (const Scope* const outer = holder(); outer != nullptr) enter(outer->request);
}

bool SdpBackendScope::within() noexcept { return !scopes.empty(); }

void SdpBackendScope::use_python(const py::tuple& read, const py::tuple& write) {
  if (read.size() != kBackends || write.size() != kBackends) {
    throw py::value_error("PyTorch has five backends of scaled dot product attention");
  }
  for (std::size_t i = 0; i < kBackends; ++i) {
    python.read[i] = py::object(read[i]).release().ptr();
    python.write[i] = py::object(write[i]).release().ptr();
  }
}

void SdpBackendScope::after_fork() {
  if (addon() != nullptr) return;  // the lock has seen to it
  in_python = within() ? 1 : 0;
  if (!within()) go();
}

}  // namespace xpuruntime::bindings

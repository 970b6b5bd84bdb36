// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "guard_state.h"

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "addon_functions.h"
#include "call_key.h"
#include "call_module.h"
#include "python_names.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// Written with the GIL.
struct State {
  PyObject* routes = nullptr;  // a dict from call keys to routes, or nothing: no policy holds
  PyObject* kinds = nullptr;   // another one from kinds of calls
  std::atomic<bool> slow{false};
  std::atomic<bool> simple{true};
  std::atomic<bool> phases{false};
  std::atomic<bool> modules{false};
  std::atomic<std::uint64_t> number{1};  // another one whenever what threads know is void
  std::unordered_set<PyObject*> places;  // owned, as long as threads may know of them
};

State& state() {
  static State instance;
  return instance;
}

struct Known {
  CallTable native;
  CallTable quick;  // with the address of a Place
  std::uint64_t number = 0;
};

Known& known_calls() {
  thread_local Known known;
  const std::uint64_t number = state_number();
  if (known.number != number) {
    known.native.clear();
    known.quick.clear();
    known.number = number;
  }
  return known;
}

// Of the first word of facts; guards are numbered from 1, and modules with 1 more than their
// number.
constexpr unsigned kModuleAt = 24;
constexpr unsigned kPhaseAt = 56;

// Whether the facts of a call were gathered under a state like this one.
bool fits(std::span<const std::uint64_t> call) {
  const bool has_module = static_cast<ModuleNumber>(call.front() >> kModuleAt) != 0;
  return state().phases.load(std::memory_order_acquire) == (call.front() >> kPhaseAt != 0) &&
         state().modules.load(std::memory_order_acquire) == has_module;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* const found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object module_now() {
  if (addon() != nullptr) {
    if (const ModuleNumber module = call_module(); module != kUntoldModule) {
      return module_path(module);
    }
  }
  return call_module_path(std::nullopt);
}

bool is_invalidated() {
  if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) return false;
  py::error_already_set error;  // takes it
  const std::string text = py::str(error.value());
  if (text.find("has been invalidated") != std::string::npos) return true;
  error.restore();
  return false;
}

}  // namespace

void set_guard_state(const py::object& routes, const py::object& kinds, bool slow, bool phases,
                     bool modules) {
  State& now = state();
  PyObject* const before = now.routes;
  PyObject* const kinds_before = now.kinds;
  now.routes = routes.is_none() ? nullptr : py::dict(routes).inc_ref().ptr();
  now.kinds = kinds.is_none() ? nullptr : py::dict(kinds).inc_ref().ptr();
  if (now.routes != before) forget_native_calls();
  now.slow.store(slow, std::memory_order_release);
  now.phases.store(phases, std::memory_order_release);
  now.modules.store(modules, std::memory_order_release);
  const bool told = addon() != nullptr || !(phases || modules);
  now.simple.store(!slow && told, std::memory_order_release);
  Py_XDECREF(before);
  Py_XDECREF(kinds_before);
}

void forget_native_calls() noexcept {
  state().number.fetch_add(1, std::memory_order_acq_rel);
  for (PyObject* const place : std::exchange(state().places, {})) Py_DECREF(place);
}

std::uint64_t next_guard_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

bool facts_decide() noexcept { return state().simple.load(std::memory_order_acquire); }

std::uint64_t first_fact(std::uint64_t guard) noexcept {
  std::uint64_t fact = guard;
  if (state().modules.load(std::memory_order_acquire)) {
    fact |= static_cast<std::uint64_t>(call_module() + 1) << kModuleAt;  // 0 where it is untold
  }
  if (state().phases.load(std::memory_order_acquire)) {
    fact |= static_cast<std::uint64_t>(call_phase()) << kPhaseAt;
  }
  return fact;
}

std::uint64_t state_number() noexcept { return state().number.load(std::memory_order_acquire); }

PyObject* phase_argument() {
  if (!state().phases.load(std::memory_order_acquire)) return Py_None;
  const CallPhase phase = call_phase();
  return phase == CallPhase::kUnknown ? Py_None : phase_text(phase);
}

CallTable& native_calls() { return known_calls().native; }

PyObject* quick_place(std::span<const std::uint64_t> call) {
  if (!facts_decide()) return nullptr;
  const std::uint64_t* const found = known_calls().quick.find(call);
  return found == nullptr ? nullptr : reinterpret_cast<PyObject*>(*found);
}

void keep_native_call(std::span<const std::uint64_t> call, std::uint64_t number,
                      SdpBackendRequest request) {
  // Nothing gives the GIL away between the two.
  if (state_number() == number && fits(call)) native_calls().keep(call, request);
}

void keep_quick_call(std::span<const std::uint64_t> call, PyObject* place, std::uint64_t number) {
  if (state_number() != number || !facts_decide() || !fits(call)) return;
  known_calls().quick.keep(call, reinterpret_cast<std::uint64_t>(place));
  if (state().places.insert(place).second) Py_INCREF(place);
}

Judgement judge(PyObject* name, std::span<PyObject* const> arrays, PyObject* out, CallPhase phase,
                bool attention) {
  const State& now = state();
  Judgement found;
  if (now.slow.load(std::memory_order_acquire)) return found;
  if (now.routes == nullptr) {
    found.verdict = Verdict::kAlways;
    return found;
  }
  static PyObject* const place_name = interned("place");
  static PyObject* const quick_name = interned("quick");
  static PyObject* const request_name = interned("backend_request");
  const py::object routes = py::reinterpret_borrow<py::object>(now.routes);
  const bool phases = now.phases.load(std::memory_order_relaxed);
  const bool modules = now.modules.load(std::memory_order_relaxed);
  const auto count = static_cast<Py_ssize_t>(arrays.size());
  const py::object key = call_key_of(name, arrays.data(), count, out);
  const bool known = !key.is_none();  // arrays that cannot be seen may look like others here
  py::object module;
  if (phases || modules) {
    // As CompiledPolicy.call_context has them.
    const bool fixed = phase != CallPhase::kUnknown;
    if (phases) found.phase = phase_text(fixed ? phase : call_phase_with_gil());
    module = modules ? module_now() : module_path(kNoModule);
  }
  const auto find = [&](PyObject* kept, const py::object& of) {
    const py::handle stated = phases ? found.phase : phase_text(CallPhase::kUnknown);
    const py::object whole = module ? py::make_tuple(of, stated, module) : of;
    PyObject* const item = PyDict_GetItemWithError(kept, whole.ptr());
    if (item == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(item);
  };
  py::object route = find(routes.ptr(), key);
  if (!route && known && attention && now.kinds != nullptr) {
    const py::object kinds = py::reinterpret_borrow<py::object>(now.kinds);
    const py::object kind = attention_kind_of(name, arrays.data(), count);
    if (!kind.is_none()) route = find(kinds.ptr(), kind);
  }
  if (!route) return found;
  found.place = attribute(route.ptr(), place_name);
  if (!found.place.is_none()) {
    const bool quick = attribute(route.ptr(), quick_name).ptr() == Py_True;
    found.verdict = quick ? Verdict::kQuick : Verdict::kAsk;
    return found;
  }
  const py::object wanted = attribute(route.ptr(), request_name);
  if (wanted.is_none()) return found;
  found.request = wanted.cast<SdpBackendRequest>();
  found.verdict = known ? Verdict::kAlways : Verdict::kNative;
  return found;
}

PyObject* call_native(PyObject* native, PyObject* const* values, std::size_t count,
                      PyObject* names) {
  static PyObject* const call = interned("call");
  PyObject* const done = PyObject_Vectorcall(attribute(native, call).ptr(), values, count, names);
  // Where another library's kernel was taken away meanwhile, the object knows what is there now.
  if (done == nullptr && is_invalidated()) {
    return PyObject_Vectorcall(native, values, count, names);
  }
  return done;
}

}  // namespace xpuruntime::bindings

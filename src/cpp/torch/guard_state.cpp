// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "guard_state.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "call_key.h"
#include "call_module.h"
#include "call_phase.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// Written with the GIL.
struct State {
  PyObject* routes = nullptr;  // a dict from call keys to routes, or nothing: no policy holds
  PyObject* circumstances = nullptr;
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

PyObject* interned(const char* text) {
  PyObject* const made = PyUnicode_InternFromString(text);
  if (made == nullptr) throw py::error_already_set();
  return made;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* const found = PyObject_GetAttr(object, name);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::str text_of(CallPhase phase) { return {std::string(phase_name(phase))}; }

// Phase and module of the call that runs.
py::tuple circumstances_now() {
  const State& now = state();
  const bool phases = now.phases.load(std::memory_order_relaxed);
  const bool modules = now.modules.load(std::memory_order_relaxed);
  if (phases || modules) {
    const ModuleNumber module = modules ? call_module() : kNoModule;
    if (module != kUntoldModule) {
      return py::make_tuple(text_of(phases ? call_phase() : CallPhase::kUnknown),
                            module_path(module));
    }
  }
  const auto call = py::reinterpret_borrow<py::object>(now.circumstances);
  const py::object rest = call();
  if (PyTuple_Check(rest.ptr()) == 0 || PyTuple_GET_SIZE(rest.ptr()) != 2) {
    throw py::type_error("the circumstances of a call are its phase and its module");
  }
  return py::reinterpret_borrow<py::tuple>(rest);
}

// (key, phase, module)
py::object with_circumstances(const py::object& key, const char* fixed) {
  const py::tuple rest = circumstances_now();
  py::object phase = rest[0];
  if (fixed != nullptr && py::len(phase) > 0) phase = py::str(fixed);
  return py::make_tuple(key, phase, rest[1]);
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

void set_guard_state(const py::object& routes, bool slow, const py::object& circumstances,
                     bool phases, bool modules) {
  State& now = state();
  PyObject* const before = now.routes;
  PyObject* const others = now.circumstances;
  now.routes = routes.is_none() ? nullptr : py::dict(routes).inc_ref().ptr();
  now.circumstances = circumstances.is_none() ? nullptr : py::object(circumstances).release().ptr();
  if (now.routes != before) forget_native_calls();
  now.slow.store(slow, std::memory_order_release);
  now.phases.store(phases, std::memory_order_release);
  now.modules.store(modules, std::memory_order_release);
  const bool told = now.circumstances == nullptr || phases || modules;
  now.simple.store(!slow && told, std::memory_order_release);
  Py_XDECREF(before);
  Py_XDECREF(others);
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
  static const std::array<PyObject*, 4> phases = [] {
    std::array<PyObject*, 4> made{};
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::string_view name = phase_name(static_cast<CallPhase>(i));
      made[i] = name.empty() ? Py_None : interned(std::string(name).c_str());
    }
    return made;
  }();
  if (!state().phases.load(std::memory_order_acquire)) return Py_None;
  return phases[static_cast<std::size_t>(call_phase())];
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

Verdict judge(PyObject* name, std::span<PyObject* const> arrays, PyObject* out, py::object* place,
              const char* phase, SdpBackendRequest* request) {
  const State& now = state();
  if (request != nullptr) *request = kAsSet;
  if (now.slow.load(std::memory_order_acquire)) return Verdict::kAsk;
  if (now.routes == nullptr) return Verdict::kAlways;
  static PyObject* const place_name = interned("place");
  static PyObject* const quick_name = interned("quick");
  static PyObject* const request_name = interned("backend_request");
  const py::object routes = py::reinterpret_borrow<py::object>(now.routes);
  const py::object key =
      call_key_of(name, arrays.data(), static_cast<Py_ssize_t>(arrays.size()), out);
  const bool known = !key.is_none();  // arrays that cannot be seen may look like others here
  const py::object whole = now.circumstances == nullptr ? key : with_circumstances(key, phase);
  PyObject* const found = PyDict_GetItemWithError(routes.ptr(), whole.ptr());
  if (found == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return Verdict::kAsk;
  }
  const auto route = py::reinterpret_borrow<py::object>(found);
  py::object ours = attribute(route.ptr(), place_name);
  if (!ours.is_none()) {
    if (place == nullptr || attribute(route.ptr(), quick_name).ptr() != Py_True) {
      return Verdict::kAsk;
    }
    *place = std::move(ours);
    return Verdict::kQuick;
  }
  const py::object wanted = attribute(route.ptr(), request_name);
  if (wanted.is_none()) return Verdict::kAsk;
  const auto asked = wanted.cast<SdpBackendRequest>();
  if (request == nullptr && asked != kAsSet) return Verdict::kAsk;
  if (request != nullptr) *request = asked;
  return known ? Verdict::kAlways : Verdict::kNative;
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

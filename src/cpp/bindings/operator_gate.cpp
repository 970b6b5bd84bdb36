// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operator_gate.h"

#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "gil.h"

namespace py = pybind11;

namespace xpuruntime::bindings {

OperatorGate::OperatorGate(const OperatorKind& kind, void* function, py::object slow,
                           py::object keyset, py::object trial)
    : kind_(kind),
      function_(function),
      slow_(std::move(slow)),
      keyset_(std::move(keyset)),
      trial_(std::move(trial)),
      number_(next_gate_number()) {}

void OperatorGate::renew(py::object slow, py::object trial) {
  slow_ = std::move(slow);
  trial_ = std::move(trial);
  tried_.store(Trial::kOpen);
  number_.store(next_gate_number());
}

std::optional<SdpaWish> OperatorGate::known(const CallFacts& facts) const {
  if (!facts_decide()) return std::nullopt;
  const SdpaWish* const found = native_calls().find(facts.words());
  return found == nullptr ? std::nullopt : std::optional(*found);
}

void OperatorGate::run(OperatorCall& call, SdpaWish wish) const {
  if (!kind_.takes_turns) {
    kind_.run(function_, call);
    return;
  }
  const SdpaTurn turn(wish);
  kind_.run(function_, call);
}

void OperatorGate::serve(OperatorCall& call) {
  CallFacts facts(number());
  const bool seen = sees(call, facts);
  if (const auto wish = seen ? known(facts) : std::nullopt) {
    run(call, *wish);
    return;
  }
  ask(call, seen ? &facts : nullptr);
}

void OperatorGate::ask(OperatorCall& call, const CallFacts* facts) {
  with_gil([&] { ask_python(call, facts); });
}

void OperatorGate::ask_python(OperatorCall& call, const CallFacts* facts) {
  std::array<py::object, OperatorCall::kMost> objects;
  const auto make = [&](bool lists) {
    for (std::size_t i = 0; i < call.size(); ++i) {
      if (call.is_list(i) == lists) objects[i] = call.object(i);
    }
  };
  make(false);
  const std::span<const py::object> given(objects.data(), call.size());
  if (facts != nullptr && decide(call, *facts, given)) return;
  make(true);
  call_python(call, given);
}

void OperatorGate::try_function() {
  const py::object trial = trial_;
  const py::object said = trial();
  if (said.is_none()) return;
  tried_.store(said.cast<std::string>().empty() ? Trial::kPassed : Trial::kFailed);
}

Verdict OperatorGate::judge_call(const OperatorCall& call, std::span<const py::object> given,
                                 py::object* place, SdpaWish* wish) const {
  const py::str name(kind_.mark(call));
  std::array<PyObject*, OperatorCall::kMost> arrays{};
  std::size_t count = 0;
  for (const char at : kind_.arrays) {
    arrays[count++] = given[static_cast<std::size_t>(at)].ptr();
  }
  return judge(name.ptr(), arrays.data(), static_cast<Py_ssize_t>(count), nullptr, place,
               kind_.phase, kind_.takes_turns ? wish : nullptr);
}

bool OperatorGate::decide(OperatorCall& call, const CallFacts& facts,
                          std::span<const py::object> given) {
  const bool has_ours = kind_.run_ours != nullptr;
  auto place = py::reinterpret_borrow<py::object>(quick_place(facts.words()));
  if (place && has_ours) return kind_.run_ours(place.ptr(), given, call);
  const std::uint64_t number = state_number();
  SdpaWish wish = kAsSet;
  Verdict verdict = judge_call(call, given, has_ours ? &place : nullptr, &wish);
  if (verdict == Verdict::kAlways && tried_.load() == Trial::kOpen) {
    try_function();
    verdict = judge_call(call, given, has_ours ? &place : nullptr, &wish);
  }
  if (verdict == Verdict::kQuick && has_ours) {
    if (!kind_.run_ours(place.ptr(), given, call)) return false;
    keep_quick_call(facts.words(), place.ptr(), number);
    return true;
  }
  if (verdict != Verdict::kAlways || tried_.load() != Trial::kPassed) return false;
  {
    const ReleaseGil unlocked;
    run(call, wish);
  }
  keep_native_call(facts.words(), number, wish);
  return true;
}

void OperatorGate::call_python(OperatorCall& call, std::span<const py::object> given) {
  std::array<PyObject*, OperatorCall::kMost + 1> values{};
  values[0] = keyset_.ptr();
  for (std::size_t i = 0; i < given.size(); ++i) values[i + 1] = given[i].ptr();
  py::object names;
  std::size_t named = 0;
  for (const char* const name : call.signature().names) named += name != nullptr ? 1 : 0;
  if (named > 0) {
    py::tuple made(named);
    for (std::size_t i = 0; i < named; ++i) made[i] = py::str(call.signature().names[i]);
    names = std::move(made);
  }
  const py::object slow = slow_;
  const auto done = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(slow.ptr(), values.data(), given.size() + 1 - named, names.ptr()));
  if (!done) throw py::error_already_set();
  call.take(done);
}

}  // namespace xpuruntime::bindings

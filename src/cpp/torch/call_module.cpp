// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "call_module.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "addon_functions.h"
#include "annotated_call.h"
#include "call_phase.h"
#include "node_modules.h"
#include "python_depth.h"
#include "python_names.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// A reference to something of Python's, given back at the end. With the GIL.
using Frame = py::object;

Frame stolen(void* frame) {
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(frame));
}

Frame this_frame() { return stolen(PyThreadState_GetFrame(PyThreadState_Get())); }

Frame back_of(const Frame& frame) {
  return frame ? stolen(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))) : Frame();
}

const void* code_of(const Frame& frame) {
  return frame ? stolen(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))).ptr()
               : nullptr;
}

// A forward that runs, and the frame that called its hook, which is gone when that has ended.
// PyTorch calls no hook after a forward that KeyboardInterrupt or SystemExit has ended.
struct Running {
  ModuleNumber module = kNoModule;
  const void* object = nullptr;  // what was entered
  const void* frame = nullptr;   // kept alive by nobody here
  const void* code = nullptr;    // of the frame, whose memory may be that of another one later
  const PyThreadState* state = nullptr;
  int depth = 0;  // of the hook: code inside of the forward is not less deep, but for one call
  std::int64_t backward = -1;  // that it was called in, as a recomputation is

  bool may_run() const noexcept { return depth_of(state) >= depth - 1; }

  bool runs_in(Frame inner) const {
    for (; inner; inner = back_of(inner)) {
      if (inner.ptr() == frame) return code_of(inner) == code;
    }
    return false;
  }
};

struct Thread {
  std::vector<Running> running;
};

thread_local Thread thread;

// Forgets forwards that have ended without a hook, as far as that is to be seen without the GIL.
const Running* innermost() noexcept {
  bool ended = false;
  for (; !thread.running.empty() && !thread.running.back().may_run(); ended = true) {
    thread.running.pop_back();
  }
  const Running* const found = thread.running.empty() ? nullptr : &thread.running.back();
  if (const auto* const torch = addon(); ended && torch != nullptr) {
    mark_nodes(torch->next_node(), found == nullptr ? kNoModule : found->module);
  }
  return found;
}

// The same, for sure, of those that `inner` would be inside of. With the GIL.
const Running* innermost_of(const Frame& inner) {
  while (const Running* const found = innermost()) {
    if (found->runs_in(inner)) return found;
    thread.running.pop_back();
  }
  return nullptr;
}

// Paths by their numbers, and numbers by their paths. With the GIL.
struct Paths {
  py::list texts;
  py::dict numbers;
};

Paths& paths() {
  static auto* const instance = [] {
    auto* const made = new Paths;  // outlives the interpreter, as its objects must
    made->texts.append(py::str());
    made->numbers[py::str()] = kNoModule;
    return made;
  }();
  return *instance;
}

ModuleNumber module_number(const py::str& path) {
  Paths& known = paths();
  PyObject* number = PyDict_GetItemWithError(known.numbers.ptr(), path.ptr());
  if (number == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const py::int_ next(known.texts.size());
    known.texts.append(path);
    known.numbers[path] = next;
    number = PyDict_GetItemWithError(known.numbers.ptr(), path.ptr());
  }
  return static_cast<ModuleNumber>(PyLong_AsUnsignedLong(number));
}

// Of a module inside of another one.
ModuleNumber joined(ModuleNumber outer, ModuleNumber inner) {
  static auto* const known = new std::map<std::pair<ModuleNumber, ModuleNumber>, ModuleNumber>;
  if (outer == kNoModule || inner == kNoModule) return outer + inner;
  const auto [found, is_new] = known->try_emplace({outer, inner}, kNoModule);
  if (is_new) {
    const std::string path =
        module_path(outer).cast<std::string>() + "." + module_path(inner).cast<std::string>();
    found->second = module_number(path);
  }
  return found->second;
}

std::uint64_t next_node() {
  if (const auto* const torch = addon()) return torch->next_node();
  static PyObject* const next = private_api("next_node");
  return called(next).cast<std::uint64_t>();
}

ModuleNumber number_of(const Running* running) noexcept {
  return running == nullptr ? kNoModule : running->module;
}

// The forward that the code of this thread is part of, given the innermost one; null in a backward
// that has begun in it, and outside of all.
const Running* forward_in(const Running* running) {
  if (running == nullptr) return nullptr;
  const std::int64_t backward = running_backward_with_gil();
  return backward == -1 || backward == running->backward ? running : nullptr;
}

// Of the node of autograd that runs in this thread. With the GIL where there is no addon.
ModuleNumber module_of_running_node() {
  if (const auto* const torch = addon()) {
    std::uint64_t number = 0;
    std::uint64_t maker = 0;
    return torch->running_node(&number, &maker) ? module_of_node(number, maker) : kNoModule;
  }
  if (running_backward_with_gil() == -1) return kNoModule;
  static PyObject* const running = private_api("running_node");
  const py::object node = called(running);
  if (node.is_none()) return kNoModule;
  std::optional<std::uint64_t> maker;
  if (const py::object noted = node.attr("thread"); !noted.is_none()) {
    maker = noted.cast<std::uint64_t>();
  }
  return module_of_node(node.attr("number").cast<std::uint64_t>(), maker);
}

// A call in a backward has recorded a node for the gradient of that: it is of the same module.
void mark_last(ModuleNumber module) {
  if (module != kNoModule) mark_node(next_node() - 1, module, number_of(innermost()));
}

}  // namespace

void enter_module(const py::str& path, py::handle object) {
  const ModuleNumber module = module_number(path);
  const PyThreadState* const state = PyThreadState_Get();
  const Frame owner = back_of(this_frame());
  thread.running.push_back({module, object.is_none() ? nullptr : object.ptr(), owner.ptr(),
                            code_of(owner), state, depth_of(state), running_backward_with_gil()});
  mark_nodes(next_node(), module);
}

void leave_module(py::handle object) {
  const void* const left = object.is_none() ? nullptr : object.ptr();
  if (const Running* const found = innermost(); found == nullptr || found->object == left) {
    if (found != nullptr) thread.running.pop_back();
  } else {
    const Running* const inside = innermost_of(this_frame());
    if (inside != nullptr && inside->object == left) thread.running.pop_back();
  }
  mark_nodes(next_node(), number_of(innermost()));
}

std::size_t running_modules() noexcept { return thread.running.size(); }

py::object running_module() {
  const Running* const found = innermost_of(this_frame());
  return found == nullptr ? py::object(py::none()) : module_path(found->module);
}

py::object outer_module() {
  const Running* const found = innermost_of(back_of(back_of(this_frame())));
  return found == nullptr ? py::object(py::none()) : module_path(found->module);
}

ModuleNumber call_module() noexcept {
  if (const ModuleNumber stated = annotated_call().module; stated != kNoModule) return stated;
  if (addon() == nullptr) return kUntoldModule;
  try {
    if (const Running* const found = forward_in(innermost())) return found->module;
    if (!runs_backward()) return kNoModule;
    const ModuleNumber module = module_of_running_node();
    if (call_phase() == CallPhase::kTrain) mark_last(module);
    return module;
  } catch (...) {
    return kUntoldModule;
  }
}

py::object call_module_path(std::optional<bool> recorded) {
  if (const ModuleNumber stated = annotated_call().module; stated != kNoModule) {
    return module_path(stated);
  }
  if (const Running* const found = forward_in(innermost_of(this_frame()))) {
    return module_path(found->module);
  }
  const ModuleNumber module = module_of_running_node();
  if (module != kNoModule && (recorded ? *recorded : records_gradients())) mark_last(module);
  return module_path(module);
}

py::object module_path(ModuleNumber module) { return paths().texts[module]; }

CompiledGraph graph_of(std::string_view name) noexcept {
  if (name == "forward") return CompiledGraph::kForward;
  return name == "backward" ? CompiledGraph::kBackward : CompiledGraph::kInference;
}

ModuleNumber compiled_module(const py::str& path, CompiledGraph graph) {
  const ModuleNumber inner = module_number(path);
  if (graph == CompiledGraph::kBackward) return joined(module_of_running_node(), inner);
  // PyTorch makes the node of compiled code before it runs its forward, so it is of the same
  // module.
  return joined(number_of(forward_in(innermost())), inner);
}

}  // namespace xpuruntime::bindings

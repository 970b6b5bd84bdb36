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

#include "call_phase.h"
#include "stated_call.h"
#include "torch_shim.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr const char* kLibrary = "libtorch_cpu.so";
// at::sequence_number::peek(), which torch.autograd has, too.
constexpr const char* kNext = "_ZN2at15sequence_number4peekEv";

using NextNumber = std::uint64_t (*)();
std::atomic<NextNumber> next_number{nullptr};

// Nodes of autograd whose module is known, by the numbers that PyTorch gives them in each thread. A
// step has thousands; a node is forgotten for one whose number is so many higher. In each word the
// number of the node is above that of its module.
constexpr std::size_t kMostNodes = std::size_t{1} << 17U;
constexpr unsigned kModuleBits = 24;
constexpr ModuleNumber kMostModules = (1U << kModuleBits) - 1;
std::array<std::atomic<std::uint64_t>, kMostNodes> nodes;

struct Thread {
  std::vector<ModuleNumber> running;
  std::uint64_t noted = ~std::uint64_t{0};
};

thread_local Thread thread;

void note(std::uint64_t node, ModuleNumber module) noexcept {
  // A call that has recorded none comes to a node of before, whose module is known.
  if (thread.noted == node || module > kMostModules) return;
  thread.noted = node;
  nodes.at(node % kMostNodes).store(node << kModuleBits | module, std::memory_order_release);
}

ModuleNumber module_of(std::uint64_t node) noexcept {
  const std::uint64_t found = nodes.at(node % kMostNodes).load(std::memory_order_acquire);
  if (found >> kModuleBits != (node << kModuleBits) >> kModuleBits) return kNoModule;
  return static_cast<ModuleNumber>(found & kMostModules);
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

PyObject* imported(const char* name, const char* module = "torch._C") {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

py::object called(PyObject* function) {
  PyObject* const found = PyObject_CallNoArgs(function);
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

bool in_backward() {
  if (next_number.load(std::memory_order_acquire) != nullptr) return runs_backward();
  static PyObject* const task = imported("_current_graph_task_id");
  return called(task).cast<std::int64_t>() != -1;
}

// Of the node of autograd that runs in this thread. With the GIL.
ModuleNumber module_of_running_node() {
  static PyObject* const running_node = imported("_current_autograd_node");
  static PyObject* const number = py::str("_sequence_nr").release().ptr();
  if (!in_backward()) return kNoModule;
  const py::object node = called(running_node);
  if (node.is_none()) return kNoModule;
  PyObject* const found = PyObject_CallMethodNoArgs(node.ptr(), number);
  if (found == nullptr) throw py::error_already_set();
  return module_of(py::reinterpret_steal<py::object>(found).cast<std::uint64_t>());
}

bool records_gradients() {
  static PyObject* const function = imported("is_grad_enabled");
  return called(function).ptr() == Py_True;
}

std::uint64_t last_node() {
  if (const NextNumber next = next_number.load(std::memory_order_acquire)) return next() - 1;
  static PyObject* const next = imported("_get_sequence_nr", "torch.autograd");
  return called(next).cast<std::uint64_t>() - 1;
}

}  // namespace

std::string open_modules() {
  const auto found = reinterpret_cast<NextNumber>(find_loaded(kLibrary, kNext));
  if (found == nullptr) return std::string("this PyTorch has no ") + kNext;
  const py::module_ torch = py::module_::import("torch");
  const py::object said = torch.attr("autograd").attr("_get_sequence_nr");
  const auto agrees = [&] { return said().cast<std::uint64_t>() == found(); };
  const py::object leaf =
      torch.attr("ones")(1, py::arg("device") = "cpu", py::arg("requires_grad") = true);
  const std::uint64_t before = found();
  const bool agreed = agrees();
  const py::object made = leaf.attr("clone")();
  const py::object number = made.attr("grad_fn").attr("_sequence_nr")();
  if (!agreed || !agrees() || number.cast<std::uint64_t>() != before || found() != before + 1) {
    return "this PyTorch's C++ functions do not number nodes of autograd as Python does";
  }
  next_number.store(found, std::memory_order_release);
  return "";
}

void enter_module(const py::str& path) { thread.running.push_back(module_number(path)); }

bool leave_module() noexcept {
  if (!thread.running.empty()) thread.running.pop_back();
  return thread.running.empty();
}

py::object running_module() {
  if (thread.running.empty()) return py::none();
  return module_path(thread.running.back());
}

ModuleNumber call_module() noexcept {
  if (const ModuleNumber stated = stated_call().module; stated != kNoModule) return stated;
  if (!thread.running.empty()) {
    const ModuleNumber module = thread.running.back();
    const NextNumber next = next_number.load(std::memory_order_acquire);
    if (module != kNoModule && call_phase() == CallPhase::kTrain) note(next() - 1, module);
    return module;
  }
  if (!runs_backward()) return kNoModule;
  try {
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;
    return module_of_running_node();
  } catch (...) {
    return kUntoldModule;
  }
}

py::object call_module_path(std::optional<bool> recorded) {
  if (const ModuleNumber stated = stated_call().module; stated != kNoModule) {
    return module_path(stated);
  }
  if (thread.running.empty()) return module_path(module_of_running_node());
  const ModuleNumber module = thread.running.back();
  const bool records = recorded ? *recorded : records_gradients();
  if (module != kNoModule && records) note(last_node(), module);
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
  const ModuleNumber outer = thread.running.empty() ? kNoModule : thread.running.back();
  // PyTorch makes the node of compiled code before it runs its forward.
  if (graph == CompiledGraph::kForward) note(last_node(), outer);
  return joined(outer, inner);
}

}  // namespace xpuruntime::bindings

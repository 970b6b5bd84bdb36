// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Python's methods are functions that bind: those of C++ do not.
py::object as_method(const py::cpp_function& function) {
  PyObject* const made = PyInstanceMethod_New(function.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Interruptions that come while something is undone, of which each begins it anew.
constexpr int kMaxInterruptions = 1000;

template <typename Undo>
void finish(const py::object& what, const Undo& undo) {
  for (int failures = 0, left = kMaxInterruptions; left > 0; --left) {
    try {
      undo();
      return;
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_Exception) && ++failures > 3) {
        error.discard_as_unraisable(what);
        return;
      }
    }
  }
}

py::object guarded(const py::object& function, const py::object& undo, const py::object& check) {
  return as_method(
      // NOLINTNEXTLINE(bugprone-exception-escape): copying references to objects throws nothing
      py::cpp_function([function, undo, check](const py::args& args, const py::kwargs& kwargs) {
        if (!check.is_none()) check(args[0]);
        try {
          return py::object(function(*args, **kwargs));
        } catch (py::error_already_set&) {
          const auto first = std::current_exception();
          finish(undo, [&] { undo(args[0]); });
          std::rethrow_exception(first);
        }
      }));
}

// Python's finalizers run Python, where an interruption that comes at that moment is lost.
class OnLoss {
 public:
  explicit OnLoss(py::object function) : function_(std::move(function)) {}
  // NOLINTNEXTLINE(bugprone-exception-escape): `finish` keeps what is raised
  ~OnLoss() {
    if (!function_ || interpreter_ends()) return;
    const py::error_scope kept;
    finish(function_, [&] { function_(); });
  }
  OnLoss(const OnLoss&) = delete;
  OnLoss& operator=(const OnLoss&) = delete;
  void disarm() { function_ = py::object(); }

 private:
  py::object function_;
};

// Blocks in a context variable, each a tuple of a value, the block around it, and who entered it.
// Python would run code of its own between any two steps of these.
enum Part : std::uint8_t { kValue, kOuter, kOwner };

py::object variable_value(const py::object& variable) {
  PyObject* found = nullptr;
  if (PyContextVar_Get(variable.ptr(), nullptr, &found) != 0) throw py::error_already_set();
  return found == nullptr ? py::object(py::none()) : py::reinterpret_steal<py::object>(found);
}

void set_variable(const py::object& variable, const py::object& value) {
  const auto token =
      py::reinterpret_steal<py::object>(PyContextVar_Set(variable.ptr(), value.ptr()));
  if (!token) throw py::error_already_set();
}

void enter_block(const py::object& variable, const py::object& value, const py::object& owner) {
  set_variable(variable, py::make_tuple(value, variable_value(variable), owner));
}

bool leave_block(const py::object& variable, const py::object& owner) {
  std::vector<py::object> inner;  // entered later, and not left yet
  py::object block = variable_value(variable);
  for (; !block.is_none();
       block = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(block.ptr(), kOuter))) {
    if (PyTuple_GET_ITEM(block.ptr(), kOwner) == owner.ptr()) break;
    inner.push_back(block);
  }
  if (block.is_none()) return false;
  auto left = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(block.ptr(), kOuter));
  for (; !inner.empty(); inner.pop_back()) {
    PyObject* const one = inner.back().ptr();
    left = py::make_tuple(py::handle(PyTuple_GET_ITEM(one, kValue)), left,
                          py::handle(PyTuple_GET_ITEM(one, kOwner)));
  }
  set_variable(variable, left);
  return true;
}

// What a block of `with` is entered and left by, as two methods.
py::tuple context_block(const py::object& variable, const std::string& value,
                        const std::string& given, const std::string& stranger) {
  // NOLINTNEXTLINE(bugprone-exception-escape): copying references to objects throws nothing
  const py::object enter = as_method(py::cpp_function([=](const py::object& self) {
    py::object answer = self.attr(given.c_str());
    enter_block(variable, self.attr(value.c_str()), self);
    return answer;
  }));
  // NOLINTNEXTLINE(bugprone-exception-escape): copying references to objects throws nothing
  const py::object leave = as_method(py::cpp_function([=](const py::args& args) {
    if (!leave_block(variable, args[0])) throw std::runtime_error(stranger);
  }));
  return py::make_tuple(enter, leave);
}

// Of the process, before those of libraries that are loaded already: they wait for threads that a
// child of a fork does not have.
void end_process(int status, void* /*unused*/) {
  std::fflush(nullptr);
  _exit(status);
}

void skip_exit_handlers() {
#ifdef __GLIBC__
  on_exit(end_process, nullptr);
#else
  std::atexit([] { end_process(0, nullptr); });
#endif
}

}  // namespace

void bind_interruption(py::module_& module) {
  module.def("guarded", guarded, py::arg("function"), py::arg("undo"),
             py::arg("check") = py::none(),
             "A method after which, where it raises anything, `undo(self)` is called until it "
             "is done, however often that is interrupted. `undo` may be called at any point of "
             "the method and of itself.");
  py::class_<OnLoss>(module, "OnLoss",
                     "Calls a function when it is dropped, until it is done; see `guarded`.")
      .def(py::init<py::object>(), py::arg("function"))
      .def("disarm", &OnLoss::disarm, "Call nothing any more.");
  module.def("context_block", context_block, py::arg("variable"), py::arg("value"),
             py::arg("given"), py::arg("stranger"),
             "`__enter__` and `__exit__` of a class whose blocks a context variable lists, each in "
             "one step.");
  module.def("skip_exit_handlers", skip_exit_handlers,
             "End this process, when it exits, without the exit handlers of C and the destructors "
             "that are registered now.");
  module.def(
      "keep_forever", [](const py::object& object) { object.inc_ref(); }, py::arg("object"),
      "Never drop an object, not even at the end of the process.");
}

}  // namespace xpuruntime::bindings

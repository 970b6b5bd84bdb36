// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bind.h"
#include "gil.h"

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

// Whether this thread was made to run a call of another one.
thread_local bool is_helper = false;

// Python makes an object for a thread that it did not start when that asks for itself, and keeps it
// for good.
void forget_thread() {
  const py::object threads = py::module_::import("sys").attr("modules").attr("get")("threading");
  if (threads.is_none()) return;
  const py::object active = py::getattr(threads, "_active", py::none());
  if (!active.is_none()) active.attr("pop")(PyThread_get_thread_ident(), py::none());
}

class AsideCall {
 public:
  AsideCall(const py::object& function, const py::args& args, const py::kwargs& kwargs)
      : function_(function), args_(args), kwargs_(kwargs) {
    context_ = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
    if (!context_) throw py::error_already_set();
  }

  // NOLINTNEXTLINE(bugprone-exception-escape): where an error cannot be kept, the program is over
  void run() noexcept {
    const AcquireGil locked;
    is_helper = true;
    try {
      if (PyContext_Enter(context_.ptr()) != 0) throw py::error_already_set();
      try {
        result_ = function_(*args_, **kwargs_);
      }
      XPURUNTIME_STOP_IF_UNWOUND
      catch (py::error_already_set& error) {
        error_.emplace(error);
      }
      if (PyContext_Exit(context_.ptr()) != 0) throw py::error_already_set();
      forget_thread();
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (py::error_already_set& error) {
      if (!error_) error_.emplace(error);
    }
  }

  // What the call has set in its context is set in this one, too, where no Python runs.
  void keep_context() const {
    for (const py::handle pair : context_.attr("items")()) {
      PyObject* const variable = PyTuple_GET_ITEM(pair.ptr(), 0);
      PyObject* const value = PyTuple_GET_ITEM(pair.ptr(), 1);
      PyObject* before = nullptr;
      if (PyContextVar_Get(variable, nullptr, &before) != 0) throw py::error_already_set();
      const auto kept = py::reinterpret_steal<py::object>(before);
      if (before == value) continue;
      const auto token = py::reinterpret_steal<py::object>(PyContextVar_Set(variable, value));
      if (!token) throw py::error_already_set();
    }
  }

  py::object take() {
    keep_context();
    if (error_) throw py::error_already_set(*std::exchange(error_, std::nullopt));
    return std::move(result_);
  }

 private:
  py::object function_;
  py::args args_;
  py::kwargs kwargs_;
  py::object context_;
  py::object result_;
  std::optional<py::error_already_set> error_;
};

// Signal handlers of Python run in the main thread, and what one thread raises in another, or a
// trace function does, comes where that one runs Python. Here it runs none.
py::object call_aside(const py::object& function, const py::args& args, const py::kwargs& kwargs) {
  if (is_helper || interpreter_ends()) return function(*args, **kwargs);
  AsideCall call(function, args, kwargs);
  std::thread helper;
  try {
    helper = std::thread([&call] { call.run(); });
  } catch (const std::system_error&) {  // no thread is left: without the protection, then
    return function(*args, **kwargs);
  }
  {
    const ReleaseGil unlocked;
    helper.join();
  }
  return call.take();
}

// Python's methods are functions that bind: those of C++ do not.
py::object as_method(const py::cpp_function& function) {
  PyObject* const made = PyInstanceMethod_New(function.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object shielded(const py::object& function) {
  // NOLINTNEXTLINE(bugprone-exception-escape): copying references to objects throws nothing
  return as_method(py::cpp_function([function](const py::args& args, const py::kwargs& kwargs) {
    return call_aside(function, args, kwargs);
  }));
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
  module.def("call_aside", call_aside, py::arg("function"),
             "Call a function in a thread of its own, with a copy of the context, and wait: no "
             "signal handler and no asynchronous exception comes in between, and when this "
             "returns, it is done.");
  module.def("shielded", shielded, py::arg("function"),
             "A method that is called as by call_aside.");
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

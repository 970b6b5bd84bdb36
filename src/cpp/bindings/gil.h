// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <Python.h>
#include <unistd.h>

#include <exception>
#include <utility>
#if __has_include(<cxxabi.h>)
#include <cxxabi.h>
#endif

namespace xpuruntime::bindings {

/// Stops a thread for good. Once the interpreter ends, a daemon thread may not have the GIL any
/// more. Python before 3.14 ends the thread there, by an unwinding that C++ frames above turn into
/// an abort of the process. A stopped thread harms nobody: the process is about to exit.
[[noreturn]] inline void stop_thread() noexcept {
  for (;;) pause();
}

#ifdef __GLIBCXX__
#define XPURUNTIME_STOP_IF_UNWOUND \
  catch (abi::__forced_unwind&) {  \
    stop_thread();                 \
  }
#else
#define XPURUNTIME_STOP_IF_UNWOUND
#endif

/// Call inside `catch (...)`: stops the thread if what is thrown is the end of the thread.
inline void stop_if_unwound() noexcept {
  try {
    throw;
  }
  XPURUNTIME_STOP_IF_UNWOUND
  catch (...) {  // NOLINT(bugprone-empty-catch): for the caller
  }
}

/// Takes the GIL back that PyEval_SaveThread has released; where the interpreter refuses it because
/// it ends, the thread stops here.
inline void take_gil_back(PyThreadState* state) noexcept {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    stop_thread();
  }
}

/// Without the GIL as long as it lives.
class ReleaseGil {
 public:
  ReleaseGil() noexcept : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() { take_gil_back(state_); }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

/// With the GIL as long as it lives, on any thread; a thread that cannot have it stops.
class AcquireGil {
 public:
  AcquireGil() noexcept : state_(ensure()) {}
  ~AcquireGil() { PyGILState_Release(state_); }
  AcquireGil(const AcquireGil&) = delete;
  AcquireGil& operator=(const AcquireGil&) = delete;

 private:
  static PyGILState_STATE ensure() noexcept {
    try {
      return PyGILState_Ensure();
    } catch (...) {
      stop_thread();
    }
  }

  PyGILState_STATE state_;
};

/// What `body` gives, with the GIL, on any thread: for calls of Python from C++.
template <typename Body>
decltype(auto) with_gil(Body&& body) {
  const AcquireGil locked;
  try {
    return std::forward<Body>(body)();
  }
  XPURUNTIME_STOP_IF_UNWOUND
  catch (...) {
    throw;
  }
}

}  // namespace xpuruntime::bindings

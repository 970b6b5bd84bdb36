// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// Where pybind11 takes the GIL back, the thread stops too if the interpreter ends: its destructors
// let nothing through, so that the end of the thread would abort the process. The linker puts this
// in place of every call of PyEval_RestoreThread in the module; see CMakeLists.txt.
#ifdef XPURUNTIME_WRAPS_RESTORE_THREAD

#include "gil.h"

extern "C" {

// NOLINTBEGIN(bugprone-reserved-identifier): the names that the linker asks for
void __real_PyEval_RestoreThread(PyThreadState* state);

void __wrap_PyEval_RestoreThread(PyThreadState* state) {
  try {
    __real_PyEval_RestoreThread(state);
  } catch (...) {
    xpuruntime::bindings::stop_thread();
  }
}
// NOLINTEND(bugprone-reserved-identifier)
}

#endif

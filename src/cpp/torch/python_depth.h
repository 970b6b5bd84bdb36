// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <Python.h>

namespace xpuruntime::bindings {

/// Calls that Python is inside of in this thread, by its state. Without the GIL, too.
inline int depth_of(const PyThreadState* state) noexcept {
#if PY_VERSION_HEX >= 0x030C0000
  return state->py_recursion_limit - state->py_recursion_remaining;
#elif PY_VERSION_HEX >= 0x030B0000
  return state->recursion_limit - state->recursion_remaining;
#else
  return state->recursion_depth;
#endif
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <span>

namespace xpuruntime::bindings {

/// A product that is kQuick, by the kernel of `place`: of `arrays`, which are two matrices, or what
/// is added and two matrices; into `out`, where that is no null. `phase`: as op_matmul takes it.
/// Nothing where PyTorch's switch for determinism is not as `place` is for, and where the kernel
/// refuses the call: Python sees to both. With the GIL. Throws py::error_already_set for what ends
/// a program.
pybind11::object quick_product(PyObject* place, std::span<PyObject* const> arrays, PyObject* out,
                               PyObject* phase);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "xpuruntime/tuning_rule.h"
#include "xpuruntime/tuning_store.h"

namespace xpuruntime::bindings {

/// A store that a Python object keeps (`find` and `put`). What the object raises becomes a note.
std::shared_ptr<TuningStore> make_python_store(const pybind11::object& store);

/// A watch that calls a Python function with the operation, the candidates, the rounds, the most
/// rounds and the seconds; one that raises ends the measurement. None: null.
TuningWatch make_python_watch(const pybind11::object& function);

/// A rule of a dict with min_effect, confidence and budget. Throws InputError.
TuningRule read_tuning_rule(const pybind11::dict& stated);

}  // namespace xpuruntime::bindings

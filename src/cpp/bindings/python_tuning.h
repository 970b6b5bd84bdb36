// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "xpuruntime/dispatcher.h"
#include "xpuruntime/tuning_rule.h"
#include "xpuruntime/tuning_store.h"

namespace xpuruntime::bindings {

/// A store that a Python object keeps (`find` and `put`). What the object raises becomes a note.
std::shared_ptr<TuningStore> make_python_store(const pybind11::object& store);

/// A watch that calls a Python function with the operation, the candidates, the rounds, the most
/// rounds and the seconds; one that raises ends the measurement. None: null.
TuningWatch make_python_watch(const pybind11::object& function);

/// An advisor that asks a Python function about kernels of these ids: with the id, the version of
/// the backend and the operation as Python kernels see it, for why not; empty: nothing is known.
KernelAdvisor make_python_advisor(const pybind11::object& function,
                                  std::set<std::string, std::less<>> kernels);

/// A rule of a dict with min_effect, confidence and budget. Throws InputError.
TuningRule read_tuning_rule(const pybind11::dict& stated);

}  // namespace xpuruntime::bindings

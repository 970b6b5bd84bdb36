// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include "xpuruntime/decision.h"
#include "xpuruntime/device_manager.h"
#include "xpuruntime/op.h"

namespace xpuruntime::bindings {

/// An operation as plain Python values, the form in which Python kernels see it; _core.pyi
/// describes it. With `info`, the facts of its device are added.
pybind11::dict to_dict(const OpDesc& op, const DeviceInfo* info = nullptr);
/// The other way round. Throws InputError for what is missing, unknown or of a wrong kind.
OpDesc op_from_dict(const pybind11::dict& dict);

pybind11::dict to_dict(const Decision& decision);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "bind.h"
#include "xpuruntime/kernel_registry.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

py::dict build_info() {
  py::dict info;
#ifdef XPURUNTIME_WITH_CUDA
  info["cuda"] = true;
  info["architectures"] = XPURUNTIME_CUDA_ARCHITECTURES;
#else
  info["cuda"] = false;
  info["architectures"] = "";
#endif
#ifdef XPURUNTIME_WITH_CUBLAS
  info["cublas"] = true;
#else
  info["cublas"] = false;
#endif
#ifdef XPURUNTIME_WITH_CUDNN
  info["cudnn"] = true;
#else
  info["cudnn"] = false;
#endif
#ifdef XPURUNTIME_WITH_CUPTI
  info["cupti"] = true;
#else
  info["cupti"] = false;
#endif
  return info;
}

}  // namespace

void bind_build(py::module_& module) {
  module.def("build_info", &build_info, "What was built into this module.");
  module.def(
      "why_not_built", &why_not_built, py::arg("word"),
      "Why the backend that a kernel's name begins with is not in this build; empty where it is.");
}

}  // namespace xpuruntime::bindings

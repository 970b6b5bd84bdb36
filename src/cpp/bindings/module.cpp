// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "bind.h"

PYBIND11_MODULE(_core, module) {
  using namespace xpuruntime::bindings;
  module.doc() = "The C++ core of xpuruntime.";
  module.attr("__version__") = XPURUNTIME_VERSION;
  bind_errors();
  bind_build(module);
  bind_device(module);
  bind_memory(module);
  bind_stream(module);
  bind_tensor(module);
  bind_array_view(module);
  bind_kernels(module);
  bind_ops(module);
  bind_call_key(module);
  bind_direct_gate(module);
  bind_gate(module);
  bind_operator_gate(module);
  bind_plain_gate(module);
  bind_onnxruntime(module);
  bind_profiler(module);
}

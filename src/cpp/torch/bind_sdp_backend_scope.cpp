// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "bind.h"
#include "sdp_backend_scope.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// A block of Python's, which no signal can leave without its end: there is no code of Python's
// between the beginning and the block.
class ScopeBlock {
 public:
  explicit ScopeBlock(SdpBackendRequest request) : request_(request) {}

  void enter() const {
    SdpBackendScope::begin(request_);
    if (PyErr_CheckSignals() == 0) return;  // that came while it waited
    SdpBackendScope::end();
    throw py::error_already_set();
  }
  static void leave(const ScopeBlock& /*self*/, const py::args& /*raised*/) {
    SdpBackendScope::end();
  }

 private:
  SdpBackendRequest request_;
};

}  // namespace

void bind_sdp_backend_scope(py::module_& module) {
  py::class_<ScopeBlock>(module, "SdpBackendScope",
                         "A block that wants something of these switches; see sdp_backend_scope.h.")
      .def(py::init<SdpBackendRequest>(), py::arg("request"))
      .def("__enter__", &ScopeBlock::enter)
      .def("__exit__", &ScopeBlock::leave);
  module.def("in_sdp_backend_scope", SdpBackendScope::within,
             "Whether this thread is in such a block.");
  module.def("use_sdp_switches", SdpBackendScope::use_python, py::arg("read"), py::arg("write"),
             "What reads and writes PyTorch's SDP backends where there is no addon.");
  module.def("after_fork_in_sdp_backend_scope", SdpBackendScope::after_fork,
             "In a child process: the scopes of other threads are over.");
}

}  // namespace xpuruntime::bindings

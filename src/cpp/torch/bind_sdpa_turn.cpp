// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "bind.h"
#include "sdpa_turn.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// A block of Python's, which no signal can leave without its end: there is no code of Python's
// between the beginning and the block.
class TurnBlock {
 public:
  explicit TurnBlock(SdpaWish wish) : wish_(wish) {}

  void enter() const {
    SdpaTurn::begin(wish_);
    if (PyErr_CheckSignals() == 0) return;  // that came while it waited
    SdpaTurn::end();
    throw py::error_already_set();
  }
  static void leave(const TurnBlock& /*self*/, const py::args& /*raised*/) { SdpaTurn::end(); }

 private:
  SdpaWish wish_;
};

}  // namespace

void bind_sdpa_turn(py::module_& module) {
  py::class_<TurnBlock>(module, "SdpaTurn",
                        "A block that wants something of these switches; see sdpa_turn.h.")
      .def(py::init<SdpaWish>(), py::arg("wish"))
      .def("__enter__", &TurnBlock::enter)
      .def("__exit__", &TurnBlock::leave);
  module.def("in_sdpa_turn", SdpaTurn::within, "Whether this thread is in such a block.");
  module.def("use_sdp_switches", SdpaTurn::use_python, py::arg("read"), py::arg("write"),
             "What reads and writes PyTorch's SDP backends where there is no addon.");
  module.def("after_fork_in_sdpa_turn", SdpaTurn::after_fork,
             "In a child process: the turns of other threads are over.");
}

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "bind.h"
#include "gil.h"
#include "xpuruntime/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

// The plain bytes of an array; with the GIL.
class Bytes {
 public:
  Bytes(const py::handle& array, int flags) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~Bytes() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Bytes(Bytes&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  Bytes& operator=(Bytes&&) = delete;

  void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

void copy_arrays(const py::list& targets, const py::list& sources) {
  if (targets.size() != sources.size()) {
    throw InputError(std::to_string(targets.size()) + " targets and " +
                     std::to_string(sources.size()) + " sources. Fix: pass one for each");
  }
  std::vector<Bytes> to, from;
  to.reserve(targets.size());
  from.reserve(sources.size());
  for (const py::handle one : targets) to.emplace_back(one, PyBUF_WRITABLE);
  for (const py::handle one : sources) from.emplace_back(one, PyBUF_SIMPLE);
  for (std::size_t at = 0; at < to.size(); ++at) {
    if (to[at].size() != from[at].size()) {
      throw InputError("target " + std::to_string(at) + " has " + std::to_string(to[at].size()) +
                       " bytes, and its source " + std::to_string(from[at].size()) +
                       ". Fix: pass arrays of one shape and dtype");
    }
  }
  const ReleaseGil unlocked;
  for (std::size_t at = 0; at < to.size(); ++at) {
    std::memcpy(to[at].data(), from[at].data(), to[at].size());
  }
}

}  // namespace

void bind_copy(py::module_& module) {
  module.def("copy_arrays", copy_arrays, "targets"_a, "sources"_a,
             "Copies arrays into others, which have their bytes one after another.");
}

}  // namespace xpuruntime::bindings

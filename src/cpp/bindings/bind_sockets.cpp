// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "bind.h"
#include "core/sockets/socket_receiver.h"
#include "gil.h"
#include "xpuruntime/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

// The GIL guards it.
class PySocketReceiver {
 public:
  explicit PySocketReceiver(int threads) : receiver_(std::make_unique<SocketReceiver>(threads)) {}
  ~PySocketReceiver() { close(); }
  PySocketReceiver(const PySocketReceiver&) = delete;
  PySocketReceiver& operator=(const PySocketReceiver&) = delete;

  int fileno() const { return receiver_->descriptor(); }

  void receive(py::object owner, int socket, const py::buffer& buffer, double seconds) {
    py::buffer_info memory = buffer.request(true);
    if (memory.ndim != 1 || (memory.size != 0 && memory.strides[0] != memory.itemsize)) {
      throw InputError("the buffer is not contiguous. Fix: pass a memoryview of plain bytes");
    }
    const std::chrono::milliseconds within{std::llround(1e3 * seconds)};
    const std::uint64_t id = next_++;
    const auto size = static_cast<std::size_t>(memory.size * memory.itemsize);
    void* const data = memory.ptr;
    pending_.emplace(id, Pending{std::move(owner), std::move(memory)});
    try {
      receiver_->receive(id, socket, data, size, within);
    } catch (...) {
      pending_.erase(id);
      throw;
    }
  }

  py::list received() {
    py::list found;
    for (const SocketReceiver::Received& one : receiver_->received()) {
      auto node = pending_.extract(one.id);
      if (!node.empty()) found.append(py::make_tuple(std::move(node.mapped().owner), one.size));
    }
    return found;
  }

  void close() {
    {
      const ReleaseGil unlocked;
      receiver_->close();
    }
    pending_.clear();
  }

 private:
  struct Pending {
    py::object owner;
    py::buffer_info memory;  // keeps the buffer
  };

  std::unique_ptr<SocketReceiver> receiver_;
  std::unordered_map<std::uint64_t, Pending> pending_;
  std::uint64_t next_ = 0;
};

}  // namespace

void bind_sockets(py::module_& module) {
  py::class_<PySocketReceiver>(module, "SocketReceiver",
                               "Receives from sockets into buffers, in threads of its own.")
      .def(py::init<int>(), "threads"_a)
      .def("fileno", &PySocketReceiver::fileno,
           "A file descriptor that can be read while `received` has something to return.")
      .def("receive", &PySocketReceiver::receive, "owner"_a, "socket"_a, "buffer"_a, "seconds"_a,
           "Begins to fill a buffer from a socket, for at most so many seconds.")
      .def("received", &PySocketReceiver::received, "What has ended since the last call.")
      .def("close", &PySocketReceiver::close, "Ends the threads. What had not ended never does.");
}

}  // namespace xpuruntime::bindings

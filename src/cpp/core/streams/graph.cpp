// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/graph.h"

#include <mutex>
#include <utility>

#include "streams/stream_calls.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

// Recorded work. Shared between the graph that captured it and those that were updated from it.
class Captured {
 public:
  Captured(int device, calls::GraphHandle handle) noexcept : device_(device), handle_(handle) {}
  ~Captured() { calls::destroy_graph(device_, handle_); }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  calls::GraphHandle handle() const noexcept { return handle_; }

 private:
  int device_;
  calls::GraphHandle handle_;
};

std::shared_ptr<const Captured> own(int device, calls::GraphHandle handle) {
  try {
    return std::make_shared<const Captured>(device, handle);
  } catch (...) {
    calls::destroy_graph(device, handle);
    throw;
  }
}

}  // namespace

struct Graph::State {
  mutable std::mutex mutex;
  std::optional<DeviceId> device;
  std::optional<Stream> stream;  // While capturing.
  std::shared_ptr<const Captured> captured;
  calls::ExecHandle exec = 0;

  ~State() {
    if (stream) calls::abort_capture(stream->device().index, stream->handle());
    if (exec != 0) calls::destroy_exec(device->index, exec);
  }

  void require_captured(const char* what) const {
    if (captured) return;
    throw InputError(std::string("cannot ") + what + " a graph that holds no work: " +
                     (stream ? "end its capture first" : "capture some from a CUDA stream first"));
  }
};

Graph::Graph() : state_(std::make_shared<State>()) {}

void Graph::begin_capture(const Stream& stream) {
  const std::scoped_lock lock(state_->mutex);
  const std::string device = to_string(stream.device());
  if (stream.device().type == DeviceType::kCpu) {
    throw UnsupportedOperationError(
        "a CPU stream cannot be captured into a graph: it does each piece of work at once, on the "
        "calling thread, so "
        "there is nothing to record; capture a stream of a CUDA device",
        device);
  }
  if (state_->stream)
    throw InputError("this graph is being captured already: end that capture first", device);
  if (state_->captured) {
    throw InputError(
        "this graph holds captured work already: capture a new Graph, and pass it to update() to "
        "replace the work of this one",
        device);
  }
  if (stream.handle() <= 2) {
    throw InputError("a default stream of " + device +
                         " cannot be captured into a graph: create a Stream for it",
                     device);
  }
  if (stream.capturing()) {
    throw InputError(
        "this stream of " + device + " is being captured already: end that capture first", device);
  }
  calls::begin_capture(stream.device().index, stream.handle());
  state_->stream = stream;
  state_->device = stream.device();
}

void Graph::end_capture() {
  std::optional<Stream> stream;  // Let go of after the lock: its owner may run code of its own.
  const std::scoped_lock lock(state_->mutex);
  if (!state_->stream) {
    throw InputError("this graph is not being captured: call begin_capture(stream) first");
  }
  stream = state_->stream;
  const int device = stream->device().index;
  calls::GraphHandle handle = 0;
  try {
    handle = calls::end_capture(device, stream->handle());
  } catch (...) {
    // Some errors leave the capture going on; then it is still this graph's.
    if (!stream->capturing()) state_->stream.reset();
    throw;
  }
  state_->stream.reset();
  state_->captured = own(device, handle);
}

void Graph::abort_capture() noexcept {
  std::optional<Stream> stream;  // As above.
  const std::scoped_lock lock(state_->mutex);
  if (!state_->stream) return;
  stream.swap(state_->stream);
  calls::abort_capture(stream->device().index, stream->handle());
}

void Graph::instantiate() {
  const std::scoped_lock lock(state_->mutex);
  state_->require_captured("instantiate");
  if (state_->exec == 0)
    state_->exec = calls::instantiate(state_->device->index, state_->captured->handle());
}

void Graph::replay(const Stream& stream) const {
  const std::scoped_lock lock(state_->mutex);
  state_->require_captured("replay");
  if (state_->exec == 0)
    throw InputError("this graph is not instantiated: call instantiate() before replay()");
  if (stream.device() != *state_->device) {
    throw InputError("a graph of " + to_string(*state_->device) +
                         " cannot be replayed on a stream of " + to_string(stream.device()) +
                         ": pass a stream of " + to_string(*state_->device),
                     to_string(*state_->device));
  }
  calls::launch_graph(state_->device->index, state_->exec, stream.handle());
}

GraphUpdate Graph::update(const Graph& newer) {
  if (state_ == newer.state_)
    throw InputError("a graph cannot be updated from itself: capture a new Graph");
  const std::scoped_lock lock(state_->mutex, newer.state_->mutex);
  state_->require_captured("update");
  newer.state_->require_captured("update from");
  if (*state_->device != *newer.state_->device) {
    throw InputError("a graph of " + to_string(*state_->device) +
                         " cannot be updated from one of " + to_string(*newer.state_->device) +
                         ": capture on " + to_string(*state_->device),
                     to_string(*state_->device));
  }
  if (state_->exec == 0)
    throw InputError("this graph is not instantiated: call instantiate() before update()");
  const int device = state_->device->index;
  const auto obstacle = calls::update_exec(device, state_->exec, newer.state_->captured->handle());
  if (obstacle) {
    const calls::ExecHandle exec = calls::instantiate(device, newer.state_->captured->handle());
    calls::destroy_exec(device, std::exchange(state_->exec, exec));
  }
  state_->captured = newer.state_->captured;
  return {.in_place = !obstacle, .reason = obstacle.value_or("")};
}

bool Graph::capturing() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->stream.has_value();
}

bool Graph::captured() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->captured != nullptr;
}

bool Graph::instantiated() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->exec != 0;
}

std::optional<DeviceId> Graph::device() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->device;
}

std::size_t Graph::node_count() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->captured
             ? calls::graph_node_count(state_->device->index, state_->captured->handle())
             : 0;
}

}  // namespace xpuruntime

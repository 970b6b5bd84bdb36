// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "xpuruntime/stream.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// What `Graph::update` did. When it could not update in place, `reason` says why, and the graph
/// was instantiated anew.
struct GraphUpdate {
  bool in_place = true;
  std::string reason;
};

/// Work recorded from a CUDA stream, to be launched again as a whole:
///
///     begin_capture(stream) → work on the stream → end_capture() → instantiate() → replay(stream),
///     many times
///
/// A graph holds addresses, not tensors: the caller keeps every buffer that captured work touches
/// for as long as the graph is replayed.
///
/// Threads: every member may be called from any thread and takes the graph's lock, except that a
/// capture ends on the thread that began it. Capture is thread-local: what other threads do cannot
/// break it. Nothing here synchronises. Errors: UnsupportedOperationError on the CPU (its streams
/// do work at once, so there is nothing to capture) and in a build without CUDA; InputError when a
/// step is taken out of order; CudaError.
class Graph {
 public:
  /// An empty graph. Dropping a graph during its capture ends the capture; dropping it while a
  /// replay runs is safe.
  Graph();

  /// Throws InputError for a default stream, which cannot be captured, for a stream that is being
  /// captured already, and when this graph holds work already: capture a new graph and pass it to
  /// `update`.
  void begin_capture(const Stream& stream);
  /// Throws CudaError when something that cannot be captured happened. The stream can be used
  /// again, and the graph is empty again.
  void end_capture();
  /// Ends a capture and drops what was recorded. Does nothing when there is none.
  void abort_capture() noexcept;

  /// Makes the graph ready to run. Slow. Does nothing the second time.
  void instantiate();
  /// Launches all of it on `stream`, in that stream's order. Throws InputError when the graph is
  /// not instantiated or the stream is on another device.
  void replay(const Stream& stream) const;
  /// Takes over the work of `newer`, which was captured and need not be instantiated. Parameters
  /// and addresses are changed in place where the two have the same topology, otherwise the graph
  /// is instantiated anew.
  GraphUpdate update(const Graph& newer);

  bool capturing() const;
  bool captured() const;
  bool instantiated() const;
  /// Nothing before the first capture.
  std::optional<DeviceId> device() const;
  /// Nodes recorded; child graphs count as one. 0 before the first capture ended.
  std::size_t node_count() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace xpuruntime

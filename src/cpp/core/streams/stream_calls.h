// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "xpuruntime/stream.h"
#include "xpuruntime/types.h"

// Every CUDA call that streams, events, graphs and tensors make. core/cuda has the bodies;
// core/no_cuda refuses with UnsupportedOperationError. `device` is the index of a CUDA device that
// exists. All of them restore the caller's current device, throw CudaError and leave no CUDA error
// behind; those that destroy something never throw, also while the process is ending.
namespace xpuruntime::calls {

using EventHandle = std::uintptr_t;
using GraphHandle = std::uintptr_t;
using ExecHandle = std::uintptr_t;

PriorityRange priority_range(int device);
StreamHandle create_stream(int device, int priority, bool non_blocking);
void destroy_stream(int device, StreamHandle stream) noexcept;
int stream_priority(int device, StreamHandle stream);
bool stream_non_blocking(int device, StreamHandle stream);
bool stream_capturing(int device, StreamHandle stream);
void synchronize_stream(int device, StreamHandle stream);
bool query_stream(int device, StreamHandle stream);
void wait_event(int device, StreamHandle stream, EventHandle event);

EventHandle create_event(int device, bool timing);
void destroy_event(int device, EventHandle event) noexcept;
void record_event(int device, EventHandle event, StreamHandle stream);
void synchronize_event(int device, EventHandle event);
bool query_event(int device, EventHandle event);
/// Throws InputError when one is not recorded or not complete.
double elapsed_us(int device, EventHandle start, EventHandle end);

/// A capture that goes on. No two of a process have the same id.
struct Capture {
  std::uint64_t id = 0;
  GraphHandle graph = 0;
};
/// Nothing when nothing is captured from the stream.
std::optional<Capture> capture_of(int device, StreamHandle stream);
/// Calls `release(object)` once, when the graph and all that was instantiated or cloned from it are
/// gone and have run. It may not call CUDA. When this throws, it is not called.
void keep_in_graph(int device, GraphHandle graph, void* object, void (*release)(void*));

/// Thread-local mode.
void begin_capture(int device, StreamHandle stream);
/// When it throws, the stream is out of capture unless another thread began it; the message says
/// which.
GraphHandle end_capture(int device, StreamHandle stream);
void abort_capture(int device, StreamHandle stream) noexcept;
void destroy_graph(int device, GraphHandle graph) noexcept;
std::size_t graph_node_count(int device, GraphHandle graph);
ExecHandle instantiate(int device, GraphHandle graph);
void destroy_exec(int device, ExecHandle exec) noexcept;
void launch_graph(int device, ExecHandle exec, StreamHandle stream);
/// Nothing when updated in place, else why it could not be.
std::optional<std::string> update_exec(int device, ExecHandle exec, GraphHandle graph);

/// Between any two of host and device memory, in the order of `stream`.
void copy_async(int device, void* destination, const void* source, std::size_t bytes,
                StreamHandle stream);
/// The index of the device whose memory `pointer` is in. Throws InputError for host memory.
int pointer_device(const void* pointer);

}  // namespace xpuruntime::calls

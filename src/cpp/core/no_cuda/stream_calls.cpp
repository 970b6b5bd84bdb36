// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "streams/stream_calls.h"

#include "xpuruntime/error.h"

namespace xpuruntime::calls {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedOperationError(
      "this build of xpuruntime has no CUDA: use device 'cpu', or install a build made with nvcc "
      "on PATH");
}

}  // namespace

PriorityRange priority_range(int) { refuse(); }
StreamHandle create_stream(int, int, bool) { refuse(); }
void destroy_stream(int, StreamHandle) noexcept {}
int stream_priority(int, StreamHandle) { refuse(); }
bool stream_non_blocking(int, StreamHandle) { refuse(); }
bool stream_capturing(int, StreamHandle) { refuse(); }
void synchronize_stream(int, StreamHandle) { refuse(); }
bool query_stream(int, StreamHandle) { refuse(); }
void wait_event(int, StreamHandle, EventHandle) { refuse(); }
EventHandle create_event(int, bool) { refuse(); }
void destroy_event(int, EventHandle) noexcept {}
void record_event(int, EventHandle, StreamHandle) { refuse(); }
void synchronize_event(int, EventHandle) { refuse(); }
bool query_event(int, EventHandle) { refuse(); }
double elapsed_us(int, EventHandle, EventHandle) { refuse(); }
std::optional<Capture> capture_of(int, StreamHandle) { refuse(); }
void keep_in_graph(int, GraphHandle, void*, void (*)(void*)) { refuse(); }
void begin_capture(int, StreamHandle) { refuse(); }
GraphHandle end_capture(int, StreamHandle) { refuse(); }
void abort_capture(int, StreamHandle) noexcept {}
void destroy_graph(int, GraphHandle) noexcept {}
std::size_t graph_node_count(int, GraphHandle) { refuse(); }
ExecHandle instantiate(int, GraphHandle) { refuse(); }
void destroy_exec(int, ExecHandle) noexcept {}
void launch_graph(int, ExecHandle, StreamHandle) { refuse(); }
std::optional<std::string> update_exec(int, ExecHandle, GraphHandle) { refuse(); }
void copy_async(int, void*, const void*, std::size_t, StreamHandle) { refuse(); }
int pointer_device(const void*) { refuse(); }

}  // namespace xpuruntime::calls

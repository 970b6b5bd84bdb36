// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "streams/stream_calls.h"

#include "cuda/check.h"
#include "xpuruntime/error.h"

namespace xpuruntime::calls {
namespace {

using cuda::as_stream;
using cuda::check;
using cuda::DeviceGuard;

cudaEvent_t as_event(EventHandle event) noexcept { return reinterpret_cast<cudaEvent_t>(event); }
cudaGraph_t as_graph(GraphHandle graph) noexcept { return reinterpret_cast<cudaGraph_t>(graph); }
cudaGraphExec_t as_exec(ExecHandle exec) noexcept {
  return reinterpret_cast<cudaGraphExec_t>(exec);
}

// What the caller did, for the errors of stream capture; nothing for any other error.
const char* capture_mistake(cudaError_t status) {
  switch (status) {
    case cudaErrorStreamCaptureUnsupported:
      return "this operation cannot be captured into a graph, and trying it spoiled the capture: "
             "move "
             "synchronisation, queries, copies of pageable memory and allocations out of the "
             "capture";
    case cudaErrorStreamCaptureInvalidated:
      return "an operation that cannot be captured ran during the capture and spoiled it: move "
             "synchronisation, queries, copies of pageable memory and allocations out of the "
             "capture";
    case cudaErrorStreamCaptureMerge:
      return "two captures were joined: an event of one capture was waited for in another";
    case cudaErrorStreamCaptureUnmatched:
      return "this stream joined the capture of another stream: end the capture where it began";
    case cudaErrorStreamCaptureUnjoined:
      return "another stream joined the capture and was never joined back: let the captured stream "
             "wait for it "
             "(stream.wait_stream(other)) before the capture ends";
    case cudaErrorStreamCaptureIsolation:
      return "captured work depends on work outside of the capture: wait for that before the "
             "capture begins";
    case cudaErrorStreamCaptureImplicit:
      return "work was given to the legacy default stream during a capture, which it would wait "
             "for: use another "
             "stream, or make the captured one non-blocking";
    case cudaErrorCapturedEvent:
      return "the event was recorded during a capture, so it stands for no point in time: it can "
             "only be waited for "
             "in that capture";
    case cudaErrorStreamCaptureWrongThread:
      return "a capture ends on the thread that began it: this is another thread, and what was "
             "captured is lost";
    default:
      return nullptr;
  }
}

void check_stream(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  const char* mistake = capture_mistake(status);
  if (mistake == nullptr) return check(status, call, device);
  (void)cudaGetLastError();
  throw CudaError(std::string(call) + " failed on cuda:" + std::to_string(device) + ": " + mistake +
                      " (" + cudaGetErrorName(status) + ")",
                  "cuda:" + std::to_string(device), static_cast<int>(status));
}

// cudaErrorNotReady is an answer.
bool complete(cudaError_t status, const char* call, int device) {
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check_stream(status, call, device);
  return true;
}

const char* update_obstacle(cudaGraphExecUpdateResult result) {
  switch (result) {
    case cudaGraphExecUpdateErrorTopologyChanged:
      return "the graphs differ in their nodes or dependencies";
    case cudaGraphExecUpdateErrorNodeTypeChanged:
      return "a node is of another type";
    case cudaGraphExecUpdateErrorFunctionChanged:
    case cudaGraphExecUpdateErrorUnsupportedFunctionChange:
      return "a kernel node runs another function";
    case cudaGraphExecUpdateErrorParametersChanged:
      return "a node's parameters changed in a way that cannot be updated";
    case cudaGraphExecUpdateErrorNotSupported:
      return "a node is of a type that cannot be updated";
    case cudaGraphExecUpdateErrorAttributesChanged:
      return "a node's attributes changed in a way that cannot be updated";
    default:
      return "CUDA gave no reason";
  }
}

}  // namespace

PriorityRange priority_range(int device) {
  const DeviceGuard guard(device);
  PriorityRange range;
  check(cudaDeviceGetStreamPriorityRange(&range.least, &range.greatest),
        "cudaDeviceGetStreamPriorityRange", device);
  return range;
}

StreamHandle create_stream(int device, int priority, bool non_blocking) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(
            &stream, non_blocking ? cudaStreamNonBlocking : cudaStreamDefault, priority),
        "cudaStreamCreateWithPriority", device);
  return reinterpret_cast<StreamHandle>(stream);
}

void destroy_stream(int device, StreamHandle stream) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  if (cudaStreamDestroy(as_stream(stream)) != cudaSuccess) (void)cudaGetLastError();
}

int stream_priority(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  int priority = 0;
  check(cudaStreamGetPriority(as_stream(stream), &priority), "cudaStreamGetPriority", device);
  return priority;
}

bool stream_non_blocking(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  unsigned int flags = 0;
  check(cudaStreamGetFlags(as_stream(stream), &flags), "cudaStreamGetFlags", device);
  return (flags & cudaStreamNonBlocking) != 0;
}

bool stream_capturing(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(as_stream(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // Another stream is, and this is the legacy
                                                  // default stream.
    (void)cudaGetLastError();
    return false;
  }
  check_stream(error, "cudaStreamIsCapturing", device);
  return status != cudaStreamCaptureStatusNone;
}

void synchronize_stream(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  check_stream(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize", device);
}

bool query_stream(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  return complete(cudaStreamQuery(as_stream(stream)), "cudaStreamQuery", device);
}

void wait_event(int device, StreamHandle stream, EventHandle event) {
  const DeviceGuard guard(device);
  check_stream(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent",
               device);
}

EventHandle create_event(int device, bool timing) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags", device);
  return reinterpret_cast<EventHandle>(event);
}

void destroy_event(int device, EventHandle event) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  if (cudaEventDestroy(as_event(event)) != cudaSuccess) (void)cudaGetLastError();
}

void record_event(int device, EventHandle event, StreamHandle stream) {
  const DeviceGuard guard(device);
  check_stream(cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord", device);
}

void synchronize_event(int device, EventHandle event) {
  const DeviceGuard guard(device);
  check_stream(cudaEventSynchronize(as_event(event)), "cudaEventSynchronize", device);
}

bool query_event(int device, EventHandle event) {
  const DeviceGuard guard(device);
  return complete(cudaEventQuery(as_event(event)), "cudaEventQuery", device);
}

double elapsed_us(int device, EventHandle start, EventHandle end) {
  const DeviceGuard guard(device);
  float milliseconds = 0.0F;
  const cudaError_t status = cudaEventElapsedTime(&milliseconds, as_event(start), as_event(end));
  if (status == cudaErrorInvalidResourceHandle || status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    const std::string where = "cuda:" + std::to_string(device);
    throw InputError(status == cudaErrorNotReady
                         ? "the time between two events on " + where +
                               " is not known yet: call end.synchronize() first"
                         : "the time between two events on " + where +
                               " is not known: record both on a stream first",
                     where);
  }
  check_stream(status, "cudaEventElapsedTime", device);
  return static_cast<double>(milliseconds) * 1000.0;
}

std::optional<Capture> capture_of(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(as_stream(stream), &status, &id, &graph);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(as_stream(stream), &status, &id, &graph);
#endif
  if (error == cudaErrorStreamCaptureImplicit) {  // As in stream_capturing.
    (void)cudaGetLastError();
    return std::nullopt;
  }
  check_stream(error, "cudaStreamGetCaptureInfo", device);
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  if (status == cudaStreamCaptureStatusInvalidated) {
    check_stream(cudaErrorStreamCaptureInvalidated, "cudaStreamGetCaptureInfo", device);
  }
  return Capture{id, reinterpret_cast<GraphHandle>(graph)};
}

void keep_in_graph(int device, GraphHandle graph, void* object, void (*release)(void*)) {
  const DeviceGuard guard(device);
  cudaUserObject_t keeper = nullptr;
  check(cudaUserObjectCreate(&keeper, object, release, 1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate", device);
  check(cudaGraphRetainUserObject(as_graph(graph), keeper, 1, cudaGraphUserObjectMove),
        "cudaGraphRetainUserObject", device);
}

void begin_capture(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  check_stream(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture", device);
}

GraphHandle end_capture(int device, StreamHandle stream) {
  const DeviceGuard guard(device);
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(as_stream(stream), &graph);
  if (status != cudaSuccess && graph != nullptr) (void)cudaGraphDestroy(graph);
  check_stream(status, "cudaStreamEndCapture", device);
  return reinterpret_cast<GraphHandle>(graph);
}

void abort_capture(int device, StreamHandle stream) noexcept {
  try {
    const DeviceGuard guard(device);
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(as_stream(stream), &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
  } catch (...) {  // The device is gone, and the capture with it.
    (void)cudaGetLastError();
  }
}

void destroy_graph(int device, GraphHandle graph) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  if (cudaGraphDestroy(as_graph(graph)) != cudaSuccess) (void)cudaGetLastError();
}

std::size_t graph_node_count(int device, GraphHandle graph) {
  const DeviceGuard guard(device);
  std::size_t count = 0;
  check(cudaGraphGetNodes(as_graph(graph), nullptr, &count), "cudaGraphGetNodes", device);
  return count;
}

ExecHandle instantiate(int device, GraphHandle graph) {
  const DeviceGuard guard(device);
  cudaGraphExec_t exec = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&exec, as_graph(graph), 0);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw OutOfMemoryError(
        "cuda:" + std::to_string(device) +
            " has no memory left to instantiate the graph: free some and try again",
        "cuda:" + std::to_string(device), 0);
  }
  check_stream(status, "cudaGraphInstantiate", device);
  return reinterpret_cast<ExecHandle>(exec);
}

void destroy_exec(int device, ExecHandle exec) noexcept {
  const DeviceGuard guard(device, std::nothrow);
  if (cudaGraphExecDestroy(as_exec(exec)) != cudaSuccess) (void)cudaGetLastError();
}

void launch_graph(int device, ExecHandle exec, StreamHandle stream) {
  const DeviceGuard guard(device);
  check_stream(cudaGraphLaunch(as_exec(exec), as_stream(stream)), "cudaGraphLaunch", device);
}

std::optional<std::string> update_exec(int device, ExecHandle exec, GraphHandle graph) {
  const DeviceGuard guard(device);
  cudaGraphExecUpdateResultInfo info{};
  const cudaError_t status = cudaGraphExecUpdate(as_exec(exec), as_graph(graph), &info);
  if (status == cudaErrorGraphExecUpdateFailure) {
    (void)cudaGetLastError();
    return update_obstacle(info.result);
  }
  check_stream(status, "cudaGraphExecUpdate", device);
  return std::nullopt;
}

void copy_async(int device, void* destination, const void* source, std::size_t bytes,
                StreamHandle stream) {
  const DeviceGuard guard(device);
  check_stream(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, as_stream(stream)),
               "cudaMemcpyAsync", device);
}

int pointer_device(const void* pointer) {
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, pointer);
  if (status != cudaSuccess) (void)cudaGetLastError();
  if (status != cudaSuccess ||
      (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged)) {
    throw InputError(
        "the pointer is not in the memory of a CUDA device: pass an array that lives on one");
  }
  return attributes.device;
}

}  // namespace xpuruntime::calls

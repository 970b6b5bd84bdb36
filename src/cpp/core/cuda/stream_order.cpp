// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda/stream_order.h"

#include <optional>

#include "cuda/capture.h"
#include "cuda/check.h"

namespace xpuruntime::cuda {
namespace {

// Clears the error of a call whose failure has an answer, so that it does not show up at another
// place.
bool succeeded(cudaError_t status) noexcept {
  if (status == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

bool captured(StreamHandle stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return !succeeded(cudaStreamIsCapturing(as_stream(stream), &status)) ||
         status != cudaStreamCaptureStatusNone;
}

cudaEvent_t as_event(StreamOrder::Event event) noexcept {
  return reinterpret_cast<cudaEvent_t>(event);
}

}  // namespace

StreamOrder::Event CudaStreamOrder::record(StreamHandle stream) noexcept {
  try {
    const DeviceGuard guard(device_);
    if (captured(stream)) return 0;
    cudaEvent_t event = nullptr;
    if (!succeeded(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return 0;
    if (succeeded(cudaEventRecord(event, as_stream(stream)))) return reinterpret_cast<Event>(event);
    (void)succeeded(cudaEventDestroy(event));
  } catch (...) {
    // No guard, no mark.
  }
  return 0;
}

bool CudaStreamOrder::finished(Event event) noexcept {
  const DeviceGuard guard(device_, std::nothrow);
  const OutsideCapture outside;
  return succeeded(cudaEventQuery(as_event(event)));
}

bool CudaStreamOrder::wait(StreamHandle stream, Event event) noexcept {
  try {
    const DeviceGuard guard(device_);
    return !captured(stream) &&
           succeeded(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0));
  } catch (...) {
    return false;
  }
}

bool CudaStreamOrder::synchronize(Event event) noexcept {
  const DeviceGuard guard(device_, std::nothrow);
  const OutsideCapture outside;
  return succeeded(cudaEventSynchronize(as_event(event)));
}

bool CudaStreamOrder::synchronize_all() noexcept {
  try {
    const DeviceGuard guard(device_);
    return succeeded(cudaDeviceSynchronize());
  } catch (...) {
    return false;
  }
}

void CudaStreamOrder::destroy(Event event) noexcept {
  const DeviceGuard guard(device_, std::nothrow);
  (void)succeeded(cudaEventDestroy(as_event(event)));
}

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/handles.h"

#include <unordered_map>

#include "cuda/capture.h"
#include "cuda/check.h"

namespace xpuruntime::cublas {

cublasLtHandle_t lt_handle(const Library& library, int device) {
  static std::mutex mutex;
  static auto* const handles = new std::unordered_map<int, cublasLtHandle_t>;
  const std::lock_guard lock(mutex);
  if (const auto found = handles->find(device); found != handles->end()) return found->second;
  const cuda::DeviceGuard guard(device);
  const cuda::OutsideCapture outside;
  cublasLtHandle_t handle = nullptr;
  library.check(library.lt_create(&handle), "cublasLtCreate", device);
  handles->emplace(device, handle);
  return handle;
}

GemmHandles::GemmHandles(const Library& library, int device) : library_(library), device_(device) {
  const cuda::DeviceGuard guard(device);
  const cuda::OutsideCapture outside;
  for (Slot& slot : slots_) {
    library.check(library.create(&slot.handle), "cublasCreate", device);
    // Partial sums are added in fp32 also where the result is narrower.
    library.check(library.set_math_mode(
                      slot.handle,
                      static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                                CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
                  "cublasSetMathMode", device);
  }
}

GemmHandles& GemmHandles::of(const Library& library, int device) {
  static std::mutex mutex;
  static auto* const all = new std::unordered_map<int, std::unique_ptr<GemmHandles>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GemmHandles>& handles = (*all)[device];
  if (handles == nullptr) handles.reset(new GemmHandles(library, device));
  return *handles;
}

GemmHandles::Lease::Lease(GemmHandles& handles, StreamHandle stream, void* workspace,
                          std::size_t bytes) {
  // A stream keeps to one handle, so that threads with streams of their own seldom meet.
  const std::size_t first = (stream >> 6U) ^ (stream >> 12U);
  Slot& slot = handles.slots_[first % handles.slots_.size()];
  lock_ = std::unique_lock(slot.mutex);
  handle_ = slot.handle;
  const Library& library = handles.library_;
  // The stream first: setting it drops the workspace.
  library.check(library.set_stream(handle_, cuda::as_stream(stream)), "cublasSetStream",
                handles.device_);
  library.check(library.set_workspace(handle_, workspace, bytes), "cublasSetWorkspace",
                handles.device_);
}

}  // namespace xpuruntime::cublas

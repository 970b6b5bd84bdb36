// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/handles.h"

#include <memory>
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

GemmHandle::GemmHandle(const Library& library, int device) : library_(library), device_(device) {
  const cuda::DeviceGuard guard(device);
  const cuda::OutsideCapture outside;
  library.check(library.create(&handle_), "cublasCreate", device);
  // Partial sums are added in fp32 also where the result is narrower.
  constexpr int kMode = CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
  const cublasStatus_t status = library.set_math_mode(handle_, static_cast<cublasMath_t>(kMode));
  if (status == CUBLAS_STATUS_SUCCESS) return;
  (void)library.destroy(handle_);
  library.check(status, "cublasSetMathMode", device);
}

GemmHandle& GemmHandle::of(const Library& library, int device) {
  static std::mutex mutex;
  static auto* const all = new std::unordered_map<int, std::unique_ptr<GemmHandle>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<GemmHandle>& handle = (*all)[device];
  if (handle == nullptr) handle.reset(new GemmHandle(library, device));
  return *handle;
}

GemmHandle::Lease::Lease(GemmHandle& owner, StreamHandle stream, void* workspace, std::size_t bytes)
    : lock_(owner.mutex_), handle_(owner.handle_) {
  const Library& library = owner.library_;
  // The stream first: setting it drops the workspace.
  library.check(library.set_stream(handle_, cuda::as_stream(stream)), "cublasSetStream",
                owner.device_);
  library.check(library.set_workspace(handle_, workspace, bytes), "cublasSetWorkspace",
                owner.device_);
}

}  // namespace xpuruntime::cublas

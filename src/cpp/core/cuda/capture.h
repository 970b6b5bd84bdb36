// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

namespace xpuruntime::cuda {

/// Lets this thread call what a graph capture elsewhere would forbid (cudaMalloc, cudaFree, event
/// queries), for one scope. Right for calls that are not part of what is captured.
class OutsideCapture {
 public:
  OutsideCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "xpuruntime/memory_resource.h"

namespace xpuruntime::cuda {

/// Order by CUDA events on the streams of one device.
class CudaStreamOrder final : public StreamOrder {
 public:
  explicit CudaStreamOrder(int device) noexcept : device_(device) {}
  Event record(StreamHandle stream) noexcept override;
  bool finished(Event event) noexcept override;
  bool wait(StreamHandle stream, Event event) noexcept override;
  bool synchronize(Event event) noexcept override;
  bool synchronize_all() noexcept override;
  void destroy(Event event) noexcept override;

 private:
  const int device_;
};

}  // namespace xpuruntime::cuda

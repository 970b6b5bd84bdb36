// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "xpuruntime/stream.h"
#include "xpuruntime/tensor.h"

namespace xpuruntime {

/// Type and index of where a tensor's memory is. Pinned and managed memory keep their DLPack types.
DLDevice dlpack_device(const Tensor& tensor) noexcept;
/// Throws UnsupportedOperationError for devices that the core does not serve.
DeviceId from_dlpack_device(DLDevice device);

/// DLPack's stream numbers for CUDA: 1 the legacy default stream, 2 the per-thread default stream,
/// others a handle. Throws InputError for 0, which DLPack leaves without a meaning, and for other
/// negative numbers than -1. Nothing for -1, which asks for no ordering.
std::optional<Stream> consumer_stream(DeviceId device, std::int64_t number);

/// The arguments of `__dlpack__`; what was not given is empty.
struct DlpackRequest {
  std::optional<std::int64_t> stream;
  std::optional<DLDevice> device;
  std::optional<bool> copy;
};

/// The tensor to hand over, and whether it is a copy. Makes the consumer's stream wait until the
/// bytes are readable; without a number that is the legacy default stream. Only a copy to the CPU,
/// which has no streams, is waited for here. Throws UnsupportedOperationError where only a copy
/// would do and `copy` is false.
std::pair<Tensor, bool> prepare_export(const Tensor& tensor, const DlpackRequest& request);

/// The caller, or whoever it gives the result to, calls the deleter once. It may be called from any
/// thread.
DLManagedTensorVersioned* to_dlpack(const Tensor& tensor, bool copied);
/// For consumers before DLPack 1.0. Throws UnsupportedOperationError for read-only tensors, which
/// these cannot be reported.
DLManagedTensor* to_dlpack_legacy(const Tensor& tensor);
/// Lives as long as `tensor`.
DLTensor dlpack_view(const Tensor& tensor) noexcept;

/// Takes ownership of `managed` when it returns, and leaves it with the caller when it throws:
/// InputError or UnsupportedOperationError for another major version, dtype, device or a layout
/// that makes no sense. On CUDA the bytes are readable in the order of `ready_on`, or without it of
/// the legacy default stream, for which producers make what they were asked for without a stream.
Tensor from_dlpack(DLManagedTensorVersioned* managed, const std::optional<Stream>& ready_on);
Tensor from_dlpack(DLManagedTensor* managed, const std::optional<Stream>& ready_on);

}  // namespace xpuruntime

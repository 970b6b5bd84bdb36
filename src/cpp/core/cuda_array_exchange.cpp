// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/cuda_array_exchange.h"

#include <memory>

#include "streams/stream_calls.h"
#include "xpuruntime/dlpack_exchange.h"
#include "xpuruntime/error.h"

namespace xpuruntime {

CudaArray to_cuda_array(const Tensor& tensor) {
  const std::string device = to_string(tensor.device());
  if (tensor.device().type != DeviceType::kCuda) {
    throw UnsupportedOperationError(
        tensor.describe() +
            " has no __cuda_array_interface__, because it is not on a CUDA "
            "device: copy it there with .to(\"cuda:0\")",
        device);
  }
  CudaArray array;
  array.typestr = to_typestr(tensor.dtype());
  if (array.typestr.empty()) {
    throw UnsupportedOperationError(tensor.describe() +
                                        " has no __cuda_array_interface__, which knows no " +
                                        to_string(tensor.dtype()) + ": exchange it by DLPack",
                                    device);
  }
  const Layout& layout = tensor.layout();
  array.data = layout.elements() == 0 ? nullptr : tensor.data();
  array.readonly = tensor.readonly();
  array.shape.assign(layout.shape().begin(), layout.shape().end());
  if (!tensor.is_contiguous()) {
    auto& strides = array.strides.emplace();
    for (const std::int64_t stride : layout.strides()) {
      strides.push_back(stride * static_cast<std::int64_t>(tensor.dtype().itemsize()));
    }
  }
  if (const auto stream = tensor.storage().ready_stream()) {
    array.stream = stream->handle() == 0 ? 1 : static_cast<std::int64_t>(stream->handle());
  }
  return array;
}

Tensor from_cuda_array(const CudaArray& array, void* owner, Storage::Release release) {
  const DType dtype = parse_typestr(array.typestr);
  Layout layout(array.shape);
  if (array.strides) {
    const auto itemsize = static_cast<std::int64_t>(dtype.itemsize());
    std::vector<std::int64_t> strides;
    for (const std::int64_t stride : *array.strides) {
      if (stride % itemsize != 0) {
        throw InputError("a stride of " + std::to_string(stride) + " bytes is no multiple of the " +
                         std::to_string(itemsize) + " bytes of " + to_string(dtype) +
                         ": make the array contiguous first");
      }
      strides.push_back(stride / itemsize);
    }
    layout = Layout(array.shape, strides);
  }
  if (array.data == nullptr && layout.elements() != 0) {
    throw InputError("a CUDA array with elements has no memory: its producer is broken");
  }
  // An array without elements may have no memory: then any device will do.
  const DeviceId device{DeviceType::kCuda,
                        array.data == nullptr ? 0 : calls::pointer_device(array.data)};
  std::optional<Stream> producer;
  if (array.stream) producer = consumer_stream(device, *array.stream);
  auto storage = std::make_shared<Storage>();
  if (producer) storage->ready_in_order_of(*producer);
  Tensor tensor(storage, array.data, dtype, std::move(layout), device, array.readonly);
  storage->on_release(owner, release);
  return tensor;
}

}  // namespace xpuruntime

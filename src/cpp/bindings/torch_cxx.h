// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <tuple>

#include "operator_call.h"

// Forms of PyTorch's C++ types, as its own functions pass them. PyTorch promises none of them: a
// function is called only after a trial, in which it gave what Python's call gives.

namespace xpuruntime::bindings {

/// An at::Tensor that a function returns: one pointer with a count. It has a destructor so that it
/// is returned as one that counts is.
struct ReturnedTensor {
  void* object = nullptr;
  ReturnedTensor() = default;
  ReturnedTensor(const ReturnedTensor&) = delete;
  ReturnedTensor& operator=(const ReturnedTensor&) = delete;
  ReturnedTensor(ReturnedTensor&& other) noexcept : object(other.object) {}
  ReturnedTensor& operator=(ReturnedTensor&&) = delete;
  ~ReturnedTensor() {}  // NOLINT(modernize-use-equals-default): = default would make it trivial

  /// What such a tensor holds, which is freed.
  static ReturnedTensor of(TorchTensor handle) {
    ReturnedTensor made;
    auto* const held = static_cast<void**>(handle);
    made.object = *held;
    delete held;
    return made;
  }
  /// As a tensor for PyTorch's C functions, which free it by delete.
  TorchTensor handle() const {
    auto* const made = new void*;
    *made = object;
    return static_cast<TorchTensor>(made);
  }
};

/// A const std::optional<at::Tensor>&, on a tensor that is somebody else's.
struct OptionalTensor {
  void* object = nullptr;
  bool given = false;

  explicit OptionalTensor(TorchTensor tensor) noexcept : given(tensor != nullptr) {
    if (tensor != nullptr) std::memcpy(static_cast<void*>(&object), tensor, sizeof object);
  }
};

/// A c10::ArrayRef<int64_t>.
struct IntegerList {
  const std::int64_t* data = nullptr;
  std::size_t size = 0;

  explicit IntegerList(std::span<const std::int64_t> values) noexcept
      : data(values.data()), size(values.size()) {}
};

using OneTensor = ReturnedTensor;
using TwoTensors = std::tuple<ReturnedTensor, ReturnedTensor>;
using ThreeTensors = std::tuple<ReturnedTensor, ReturnedTensor, ReturnedTensor>;

}  // namespace xpuruntime::bindings

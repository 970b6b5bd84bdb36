// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// A c10::DispatchKeySet.
using TorchKeys = std::uint64_t;

/// A kernel of PyTorch's dispatcher as functions in C++, of which neither goes through Python by
/// itself. What they take first is `functor`, then, for `plain`, the keyset and the operator's own
/// arguments: tensors and Scalars by their addresses. It gives a TorchOwned, or where it writes
/// into `out`, the address of that.
struct TorchFunctions {
  void* functor = nullptr;
  void* boxed = nullptr;
  void* plain = nullptr;
};

/// An at::Tensor that a function gives: a reference to it, which is the receiver's. With a
/// destructor, so that it comes as PyTorch's do. Empty, it is no tensor at all.
class TorchOwned {
 public:
  TorchOwned() = default;
  TorchOwned(TorchOwned&& other) noexcept : tensor_(other.tensor_) { other.tensor_ = nullptr; }
  TorchOwned(const TorchOwned&) = delete;
  TorchOwned& operator=(const TorchOwned&) = delete;
  TorchOwned& operator=(TorchOwned&&) = delete;
  // Nothing here holds one: what is made is the receiver's at once.
  ~TorchOwned() {}  // NOLINT(modernize-use-equals-default): not trivial
  /// Another reference to the tensor of a handle. Throws std::runtime_error.
  static TorchOwned of(TorchTensor handle);

 private:
  void* tensor_ = nullptr;
};

/// A c10::Scalar.
struct TorchScalar {
  enum class Kind : std::int32_t { kFloat, kInteger, kUnsigned, kComplex, kTruth };

  Kind kind;
  alignas(16) union {
    double real;
    std::int64_t integer;
    std::uint64_t natural;
  } value;
  double imaginary;

  bool is_one() const noexcept {
    return (kind == Kind::kInteger && value.integer == 1) ||
           (kind == Kind::kFloat && value.real == 1.0);
  }
  /// As Python has it. With the GIL. Throws py::error_already_set.
  pybind11::object object() const;
};

/// Opens PyTorch's dispatcher, of whose functions and structures in C++ none is promised to stay:
/// every one is compared with what PyTorch says otherwise before anything is changed. Once. Returns
/// what is against using it, or nothing. With the GIL, after open_torch_shim().
std::string open_torch_dispatcher();

/// The kernel that an operator, such as "aten::mm.out", has at a key now; empty where it has none
/// that can be called so. With the GIL, once the dispatcher is open.
TorchFunctions find_functions(const std::string& name, const std::string& key);

/// Puts functions over what an operator has at a key. Returns what takes them away again. With the
/// GIL, once the dispatcher is open. Throws std::runtime_error in PyTorch's words.
std::function<void()> place_functions(const std::string& name, const std::string& key,
                                      const TorchFunctions& functions);

}  // namespace xpuruntime::bindings

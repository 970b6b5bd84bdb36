// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "torch_shim.h"

namespace xpuruntime::bindings {

/// What an operator of PyTorch's takes and gives.
struct OperatorSignature {
  /// With its namespace where that is not aten: "native_layer_norm".
  std::string_view name;
  /// A letter for each argument: t a tensor, o an optional one, l integers, m bools, f a number, g
  /// an optional one, b a bool.
  std::string_view arguments;
  /// How many tensors it gives.
  std::size_t results = 1;
  /// Names of the last arguments, which Python gives by name alone.
  std::array<const char*, 2> names{};
};

/// One call of an operator whose arguments are no tensors alone: as PyTorch hands it to a kernel in
/// C, or as Python has it. Holds the arguments and the results.
class OperatorCall {
 public:
  static constexpr std::size_t kMost = 9;

  /// Takes over what `values` hold; the destructor puts the results there, or drops them where an
  /// error has ended the call. Needs no GIL. Throws std::runtime_error where PyTorch's functions
  /// fail.
  OperatorCall(const OperatorSignature& signature, TorchValue* values);
  /// Borrows the tensors of Python's objects; all arguments are by place. With the GIL. Throws
  /// TypeError.
  OperatorCall(const OperatorSignature& signature, const pybind11::args& arguments);
  /// As PyTorch calls a function in C++: what is given is put, each at its place; tensors and lists
  /// are borrowed. The results are taken by `release`, and dropped by the destructor otherwise.
  explicit OperatorCall(const OperatorSignature& signature);
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;
  ~OperatorCall();

  const OperatorSignature& signature() const noexcept { return *signature_; }
  std::size_t size() const noexcept { return signature_->arguments.size(); }
  /// Null where an optional one is not given, or is a tensor that is not defined.
  TorchTensor tensor(std::size_t at) const noexcept { return arguments_[at].tensor; }
  std::span<const std::int64_t> integers() const noexcept { return integers_; }
  double number(std::size_t at) const noexcept { return arguments_[at].number; }
  std::optional<double> optional_number(std::size_t at) const noexcept {
    return arguments_[at].given ? std::optional(arguments_[at].number) : std::nullopt;
  }
  bool flag(std::size_t at) const noexcept { return arguments_[at].bits != 0; }
  /// The bools of a list, the first in the lowest bit.
  std::uint32_t bits(std::size_t at) const noexcept { return arguments_[at].bits; }

  bool is_list(std::size_t at) const noexcept {
    return signature_->arguments[at] == 'l' || signature_->arguments[at] == 'm';
  }

  void put_tensor(std::size_t at, TorchTensor tensor) noexcept;
  /// A tensor that is not defined is one that is not given.
  void put_optional(std::size_t at, TorchTensor tensor);
  void put_integers(std::size_t at, std::span<const std::int64_t> values) noexcept;
  /// A list of bools, or one.
  void put_bits(std::size_t at, std::uint32_t bits, std::size_t count) noexcept;
  void put_number(std::size_t at, double number) noexcept;

  /// An argument as Python has it. With the GIL.
  pybind11::object object(std::size_t at) const;
  /// Makes a tensor a result; it is the call's from then on.
  void give(std::size_t at, TorchTensor result) noexcept;
  /// A result, which is the caller's from then on.
  TorchTensor release(std::size_t at) noexcept;
  /// Makes what Python has returned the results. With the GIL. Throws TypeError.
  void take(const pybind11::object& returned);
  /// The results as Python has them, None for one that is not defined. With the GIL.
  pybind11::object returned() const;

 private:
  struct Argument {
    TorchTensor tensor = nullptr;
    double number = 0;
    std::uint32_t bits = 0;
    std::uint32_t count = 0;  // of the bools of a list
    bool given = false;
  };

  void read(std::size_t at, TorchValue value);
  void read_optional(std::size_t at, TorchTensor tensor);
  void read_list(std::size_t at, TorchValue value, bool bools);
  void read(std::size_t at, const pybind11::handle& value);
  TorchTensor handle_of(const pybind11::handle& object) const;

  const OperatorSignature* signature_;
  TorchValue* values_;  // null where others have the arguments
  int errors_ = std::uncaught_exceptions();
  std::array<Argument, kMost> arguments_{};
  std::array<TorchTensor, 3> results_{};
  std::vector<std::int64_t> kept_;
  std::span<const std::int64_t> integers_;  // kept, or borrowed
};

/// PyTorch's functions for what is no tensor, or null before they are opened.
struct TorchValueShim {
  TorchStatus (*list_size)(void*, std::size_t*);
  TorchStatus (*list_item)(void*, std::size_t, TorchValue*);
  TorchStatus (*drop_list)(void*);
  /// Null before PyTorch 2.13, where an optional value lies in memory of new.
  TorchStatus (*drop_optional)(TorchValue*);
  TorchStatus (*make_undefined)(TorchTensor*);
  TorchStatus (*is_defined)(TorchTensor, bool*);
  TorchStatus (*offset)(TorchTensor, std::int64_t*);
  /// A tensor on the memory of another: shape, strides, offset.
  TorchStatus (*view)(TorchTensor, std::int64_t, const std::int64_t*, const std::int64_t*,
                      std::int64_t, TorchTensor*);
  bool (*records_gradients)();
};

/// Opens them once, after `open_torch_shim`. Returns what is against using them, or nothing.
std::string open_torch_values();
const TorchValueShim& torch_values() noexcept;

}  // namespace xpuruntime::bindings

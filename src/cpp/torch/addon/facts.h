// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace xpuruntime::torch_addon {

/// True for a dense tensor on the CPU or CUDA: no `__torch_dispatch__`, no transform, no symbolic
/// size, nothing nested or wrapped.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  static const std::uint64_t plain =
      (DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::CUDA) |
       DispatchKeySet(DispatchKey::ADInplaceOrView) | DispatchKeySet(DispatchKey::AutogradCPU) |
       DispatchKeySet(DispatchKey::AutogradCUDA) | DispatchKeySet(DispatchKey::AutocastCPU) |
       DispatchKeySet(DispatchKey::AutocastCUDA))
          .raw_repr();
  const std::uint64_t keys = tensor.key_set().raw_repr();
  return keys != 0 && (keys & ~plain) == 0;
}

/// What distinguishes kinds of calls of a guard, as words. As fine as `_core.call_key`.
class Facts {
 public:
  explicit Facts(std::uint64_t first) { words_[0] = first; }

  const std::uint64_t* data() const { return words_.data(); }
  std::size_t size() const { return size_; }

  bool add(std::uint64_t word) {
    if (size_ >= words_.size()) return false;
    words_[size_++] = word;
    return true;
  }
  /// Shape, strides, type, device, alignment. False where the tensor is not plain, or there are too
  /// many facts.
  bool add(const at::Tensor& tensor) {
    if (!is_plain(tensor) || !tensor.has_storage()) return false;
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const std::size_t rank = sizes.size();
    if (size_ + 1 + 2 * rank > words_.size()) return false;
    const auto byte = [](auto value) { return static_cast<std::uint64_t>(value) & 0xFFU; };
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    words_[size_++] = byte(rank) | byte(tensor.device().type()) << 8U |
                      byte(tensor.device().index()) << 16U | byte(address % 16) << 24U |
                      byte(tensor.scalar_type()) << 32U;
    for (const auto size : sizes) words_[size_++] = static_cast<std::uint64_t>(size);
    for (const auto stride : strides) words_[size_++] = static_cast<std::uint64_t>(stride);
    return true;
  }

  // Arguments of operators, by their types.
  bool see(const at::Tensor& tensor) { return add(tensor); }
  bool see(const std::optional<at::Tensor>& tensor) {
    const bool given = tensor.has_value() && tensor->defined();
    return add(given ? 1U : 0U) && (!given || add(*tensor));
  }
  bool see(at::IntArrayRef values) {
    for (const auto value : values) {
      if (!add(static_cast<std::uint64_t>(value))) return false;
    }
    return true;
  }
  template <std::size_t kCount>
  bool see(const std::array<bool, kCount>& mask) {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < kCount; ++i) bits |= (mask[i] ? 1U : 0U) << i;
    return add(bits);
  }
  /// Kernels are given `eps` and `scale`, and do not depend on them.
  bool see(double /*number*/) { return true; }
  bool see(const std::optional<double>& /*number*/) { return true; }
  /// Only sums and products that are not scaled have routes without Python.
  bool see(const at::Scalar& number) {
    return !number.isComplex() && !number.isBoolean() &&
           (number.isFloatingPoint() ? number.toDouble() == 1.0 : number.equal(1));
  }

 private:
  std::array<std::uint64_t, 96> words_;
  std::size_t size_ = 1;
};

}  // namespace xpuruntime::torch_addon

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/element.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

/// One operand of a launch, seen as four dimensions: shorter shapes get leading ones. A dimension
/// of 1 has stride 0, so an index along it broadcasts. An operand that was left out is
/// false.
struct View {
  bool present = false;
  std::byte* data = nullptr;
  Element element = Element::kFp32;
  std::array<std::int64_t, 4> shape{1, 1, 1, 1};
  std::array<std::int64_t, 4> strides{};

  explicit operator bool() const noexcept { return present; }

  std::int64_t offset(std::int64_t i, std::int64_t j, std::int64_t k,
                      std::int64_t l) const noexcept {
    return i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
  }
  double get(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const noexcept {
    return load(element, data, offset(i, j, k, l));
  }
  double get(std::int64_t k, std::int64_t l) const noexcept { return get(0, 0, k, l); }
  double get(std::int64_t l) const noexcept { return get(0, 0, 0, l); }
  void set(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l,
           double value) const noexcept {
    store(element, data, offset(i, j, k, l), value);
  }
  void set(std::int64_t k, std::int64_t l, double value) const noexcept { set(0, 0, k, l, value); }
  void set(std::int64_t l, double value) const noexcept { set(0, 0, 0, l, value); }

  /// The row (i, j, k, ...) along the last dimension, as doubles.
  void get_row(std::int64_t i, std::int64_t j, std::int64_t k, double* out) const noexcept {
    const std::byte* row =
        data + offset(i, j, k, 0) * static_cast<std::int64_t>(element_size(element));
    for (std::int64_t l = 0; l < shape[3]; ++l) out[l] = load(element, row, l * strides[3]);
  }
  void set_row(std::int64_t i, std::int64_t j, std::int64_t k, const double* in) const noexcept {
    for (std::int64_t l = 0; l < shape[3]; ++l) set(i, j, k, l, in[l]);
  }

  static std::size_t element_size(Element element) noexcept;
};

/// The operand of a slot; `operands` as in Kernel::launch, or null where only shape and type
/// matter. Its type is one of Element.
View view(const OpDesc& op, std::size_t slot, void* const* operands);

/// Elements of a shape, 0 when one dimension is.
std::int64_t elements(const TensorDesc& tensor) noexcept;

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/element.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/operand.h"

namespace xpuruntime::testing {

using Dims = std::vector<std::int64_t>;

inline constexpr DType kFp64{2, 64, 1};
inline constexpr DType kFp32{2, 32, 1};
inline constexpr DType kFp16{2, 16, 1};
inline constexpr DType kBf16{4, 16, 1};
inline constexpr DType kE4m3{10, 8, 1};
inline constexpr DType kBool{6, 8, 1};
inline constexpr DType kInt64{0, 64, 1};

/// An array for operations, of any dtype and layout, between guards that are checked. A new one is
/// full of 0xFF: NaN in every floating-point type.
class Array {
 public:
  /// `order` lists the dimensions from the slowest in memory to the fastest; `gap` leaves that many
  /// elements between neighbours of the fastest one, and `pad` after each of its rows.
  Array(DType dtype, Dims shape, std::vector<std::size_t> order = {}, std::int64_t gap = 0,
        std::int64_t pad = 0)
      : dtype_(dtype), shape_(std::move(shape)), strides_(shape_.size()) {
    if (order.empty()) {
      for (std::size_t i = 0; i < shape_.size(); ++i) order.push_back(i);
    }
    std::int64_t stride = 1 + gap;
    for (std::size_t i = order.size(); i-- > 0;) {
      strides_[order[i]] = stride;
      stride *= std::max<std::int64_t>(shape_[order[i]], 1);
      if (i + 1 == order.size()) stride += pad;
    }
    bytes_.assign(static_cast<std::size_t>(stride) * dtype.itemsize() + 2 * kGuard, 0xFF);
  }

  Array& fill(std::mt19937& random, double scale = 1.0) {
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < count(); ++i) set(i, scale * normal(random));
    return *this;
  }
  Array& fill(double value) {
    for (std::int64_t i = 0; i < count(); ++i) set(i, value);
    return *this;
  }

  std::int64_t count() const {
    std::int64_t n = 1;
    for (const std::int64_t length : shape_) n *= length;
    return n;
  }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  /// By the index in row-major order, whatever the layout.
  double get(std::int64_t index) const { return cpu::load(element(), origin(), offset(index)); }
  void set(std::int64_t index, double value) {
    if (dtype_ == kBool) {
      origin()[offset(index)] = static_cast<std::byte>(value != 0.0 ? 1 : 0);
    } else if (dtype_ == kInt64) {
      const auto whole = static_cast<std::int64_t>(value);
      std::memcpy(origin() + offset(index) * 8, &whole, 8);
    } else {
      cpu::store(element(), origin(), offset(index), value);
    }
  }
  double at(std::initializer_list<std::int64_t> index) const { return at(Dims(index)); }
  template <typename Index>
  double at(const Index& index) const {
    std::int64_t flat = 0;
    std::size_t d = 0;
    for (const std::int64_t i : index) flat = flat * shape_[d++] + i;
    return get(flat);
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (std::int64_t i = 0; i < count(); ++i) out.push_back(get(i));
    return out;
  }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  Operand operand(const char* name) {
    Operand out;
    out.name = name;
    out.absent = false;
    out.rank = static_cast<std::uint8_t>(shape_.size());
    out.dtype = dtype_;
    out.data = origin();
    std::copy(shape_.begin(), shape_.end(), out.shape.begin());
    std::copy(strides_.begin(), strides_.end(), out.strides.begin());
    return out;
  }
  /// Whether nothing was written before or after the elements.
  bool guards_hold() const {
    const auto held = [](unsigned char byte) { return byte == 0xFF; };
    return std::all_of(bytes_.begin(), bytes_.begin() + kGuard, held) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), held);
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 64;

  cpu::Element element() const { return *cpu::element_of(dtype_); }
  std::byte* origin() { return reinterpret_cast<std::byte*>(bytes_.data() + kGuard); }
  const std::byte* origin() const {
    return reinterpret_cast<const std::byte*>(bytes_.data() + kGuard);
  }
  std::int64_t offset(std::int64_t index) const {
    std::int64_t out = 0;
    for (std::size_t d = shape_.size(); d-- > 0;) {
      out += index % shape_[d] * strides_[d];
      index /= shape_[d];
    }
    return out;
  }

  DType dtype_;
  Dims shape_, strides_;
  std::vector<unsigned char> bytes_;
};

/// Sets the outputs of a call in order.
inline void set_outputs(OpCall& call, std::vector<Array*> outputs) {
  for (std::size_t i = 0; i < call.outputs().size(); ++i) {
    const OutputSpec spec = call.outputs()[i];
    call.set_output(spec, outputs.at(i)->operand(spec.name));
  }
}

inline KernelRegistry::Definition find_kernel(const KernelRegistry& registry, OpKind op,
                                              const std::string& id) {
  for (const auto& definition : registry.kernels(op)) {
    if (definition->id() == id) return definition;
  }
  throw InputError("no kernel " + id);
}

/// Runs a prepared call with one kernel and a poisoned workspace of exactly the size it asks for;
/// throws UnsupportedOperationError with the reason when it does not support the call.
inline void run_kernel(const KernelRegistry& registry, const std::string& id, const OpCall& call) {
  const auto definition = find_kernel(registry, call.desc.kind, id);
  const DeviceInfo device;
  const Support support = definition->supports(call.desc, device);
  if (!support.ok) throw UnsupportedOperationError(support.reason);
  const auto kernel = definition->prepare(call.desc, device, "");
  const std::size_t bytes = kernel->workspace_bytes();
  constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  const std::unique_ptr<void, Free> workspace(bytes == 0 ? nullptr
                                                         : ::operator new(bytes, kAlignment));
  if (bytes > 0) std::memset(workspace.get(), 0xFF, bytes);
  kernel->launch(call.data.data(), workspace.get(), 0);
}

}  // namespace xpuruntime::testing

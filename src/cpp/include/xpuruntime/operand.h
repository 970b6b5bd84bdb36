// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "xpuruntime/dtype.h"
#include "xpuruntime/op.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// An array as a caller hands it to an operation: a view that owns nothing. `name` is that of the
/// argument, for messages. One that is `absent` was left out.
struct Operand {
  static constexpr std::size_t kMaxRank = 8;

  const char* name = "";
  bool absent = true;
  bool readonly = false;
  std::uint8_t rank = 0;
  DType dtype{};
  DeviceId device;
  void* data = nullptr;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  ///< in elements

  std::int64_t elements() const noexcept;
  /// Counted from the end: `size(0)` is the last dimension.
  std::int64_t size(std::size_t from_end) const noexcept { return shape[rank - 1U - from_end]; }
  std::int64_t stride(std::size_t from_end) const noexcept { return strides[rank - 1U - from_end]; }
};

/// "a [2, 3] float32 on cuda:0".
std::string describe(const Operand& operand);

/// Gives it the strides of a contiguous array of its shape.
void set_dense_strides(Operand& operand) noexcept;

/// An output that an operation asks for: the caller allocates it contiguous, or hands in one that
/// `OpCall::set_output` finds right.
struct OutputSpec {
  const char* name = "";
  std::uint8_t slot = 0;
  DType dtype{};
  std::uint8_t rank = 0;
  /// A new array should lie channels last: [n, h, w, c] in memory, seen as [n, c, h, w].
  bool channels_last = false;
  std::array<std::int64_t, Operand::kMaxRank> shape{};

  std::span<const std::int64_t> dims() const noexcept { return {shape.data(), rank}; }
};

/// An output of the shape and dtype of `operand`.
OutputSpec output_like(const Operand& operand, const char* name, std::uint8_t slot);

/// One call of an operation, checked and ready for CallSite::run once its outputs are set. Made by
/// the functions of matmul_op.h, attention_op.h, norm_op.h and conv_op.h.
class OpCall {
 public:
  OpDesc desc;
  std::array<void*, kMaxSlots> data{};

  std::span<const OutputSpec> outputs() const noexcept { return {outputs_.data(), count_}; }
  /// Throws InputError when `operand` has another shape, dtype or device than the spec, is
  /// read-only, has elements that share memory with each other, with an input or with an output
  /// that was set before, or cannot be seen as the operation needs it without a copy. What a norm
  /// writes may be the very place of an input of the same shape and strides.
  void set_output(const OutputSpec& spec, const Operand& operand);
  /// Whether every output has no element, so that there is nothing to do.
  bool empty() const noexcept;

  /// For the functions that make calls. `set` throws InputError for an address that is not aligned
  /// to an element.
  void begin(OpKind kind, std::size_t slots, DeviceId device);
  /// Describes one operand in a slot by the dimensions given.
  void set(std::size_t slot, const Operand& operand, std::span<const std::int64_t> shape,
           std::span<const std::int64_t> strides);
  /// As it is; rank at most TensorDesc::kMaxRank.
  void set(std::size_t slot, const Operand& operand);
  /// `keep`: how many of the last dimensions stand for themselves in the slot; those before are
  /// joined into one; where there are none, into one of size 1 with `always_join` only.
  void add_output(const OutputSpec& spec, std::size_t keep, bool always_join = false);

 private:
  struct Shaping {
    std::size_t keep = 0;
    bool always_join = false;
  };
  void require_own_memory(std::size_t slot, const Operand& operand) const;

  std::array<const char*, kMaxSlots> names_{};
  std::array<OutputSpec, 4> outputs_{};
  std::array<Shaping, 4> shaping_{};
  std::size_t count_ = 0;
};

/// A view of `operand` with all but its last `keep` dimensions joined into one, which is put in
/// front. Throws InputError where the strides do not allow that without a copy.
Operand join_leading(const Operand& operand, std::size_t keep);

/// Throws InputError naming both when the second is on another device.
void require_same_device(const Operand& first, const Operand& second);
/// Throws InputError naming both when the second has another dtype.
void require_same_dtype(const Operand& first, const Operand& second);
/// Throws InputError unless the operand is given.
void require_present(const Operand& operand);
/// Throws InputError unless the operand has this rank; `form` such as "[batch, heads, length,
/// head_dim]" says what is meant.
void require_rank(const Operand& operand, std::size_t rank, const char* form);

inline bool is_float(DType dtype, int bits) noexcept {
  return dtype.code == 2 && dtype.bits == bits;
}
/// A number as operations on such tensors take it: itself for float64, else the nearest float.
inline double in_precision_of(DType dtype, double value) noexcept {
  if (is_float(dtype, 64)) return value;
  constexpr double kMost = std::numeric_limits<float>::max();
  if (std::abs(value) > kMost) return std::copysign(std::numeric_limits<double>::infinity(), value);
  return static_cast<double>(static_cast<float>(value));
}
inline bool is_bfloat(DType dtype) noexcept { return dtype.code == 4; }
/// fp16, bf16, fp32 or fp64.
bool is_real(DType dtype) noexcept;

}  // namespace xpuruntime

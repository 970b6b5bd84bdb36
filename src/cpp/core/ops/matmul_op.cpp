// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/matmul_op.h"

#include <algorithm>
#include <string>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

using Slot = slots::Matmul;

bool is_fp8(DType dtype) noexcept { return dtype.bits == 8 && dtype.code >= 7 && dtype.code <= 14; }

void check_inputs(const MatmulInputs& inputs) {
  const Operand& a = inputs.a;
  const Operand& b = inputs.b;
  require_present(a);
  require_present(b);
  for (const Operand* operand : {&a, &b}) {
    if (operand->rank < 2) {
      throw InputError(describe(*operand) +
                       " has fewer than 2 dimensions: a vector is a matrix of one row or column. "
                       "Fix: reshape it");
    }
    if (!is_real(operand->dtype) && !is_fp8(operand->dtype)) {
      throw InputError(
          describe(*operand) +
          " has a dtype that is not multiplied here. Fix: use float16, bfloat16, float32, "
          "float64 or float8_e4m3fn");
    }
  }
  require_same_device(a, b);
  require_same_dtype(a, b);
  if (a.size(0) != b.size(1)) {
    throw InputError(describe(a) + " and " + describe(b) +
                     " do not fit: the last dimension of 'a' (" + std::to_string(a.size(0)) +
                     ") must be the last but one of 'b' (" + std::to_string(b.size(1)) +
                     "). Fix: transpose one of them, or pass 'b' with " +
                     std::to_string(a.size(0)) + " rows");
  }
  const Operand& bias = inputs.bias;
  if (!bias.absent) {
    require_same_device(a, bias);
    if (!is_fp8(a.dtype)) require_same_dtype(a, bias);
    require_rank(bias, 1, "[n]");
    if (bias.size(0) != b.size(0)) {
      throw InputError(describe(bias) + " does not fit " + describe(b) + ": it needs " +
                       std::to_string(b.size(0)) + " elements. Fix: pass one a column of 'b'");
    }
  }
  for (const Operand* scale : {&inputs.scale_a, &inputs.scale_b}) {
    if (scale->absent) continue;
    require_same_device(a, *scale);
    if (!is_fp8(a.dtype)) {
      throw InputError(describe(*scale) + " is given for inputs of " + to_string(a.dtype) +
                       ", and only float8 inputs have scales. Fix: leave it out");
    }
    if (!is_float(scale->dtype, 32) || scale->elements() != 1) {
      throw InputError(describe(*scale) + " must be one float32 element. Fix: pass [1.0]");
    }
  }
}

DType result_dtype(const MatmulInputs& inputs, const MatmulOptions& options) {
  const DType a = inputs.a.dtype;
  constexpr DType kBfloat16{4, 16, 1};
  const DType dtype = options.out_dtype.value_or(is_fp8(a) ? kBfloat16 : a);
  const bool fits = is_fp8(a) ? is_real(dtype) && dtype.bits <= 32
                              : dtype == a || (a.bits == 16 && is_float(dtype, 32));
  if (!fits) {
    throw InputError("out_dtype " + to_string(dtype) + " is not possible for inputs of " +
                     to_string(a) + ". Fix: leave it out" +
                     (a.bits <= 16 ? std::string(", or ask for float32") : std::string()));
  }
  return dtype;
}

// The batch of the result, by NumPy's rule.
std::size_t broadcast_batch(const Operand& a, const Operand& b,
                            std::array<std::int64_t, Operand::kMaxRank>& shape) {
  const std::size_t rank_a = a.rank - 2U;
  const std::size_t rank_b = b.rank - 2U;
  const std::size_t rank = std::max(rank_a, rank_b);
  for (std::size_t i = 0; i < rank; ++i) {
    const std::int64_t from_a = i < rank_a ? a.shape[rank_a - 1 - i] : 1;
    const std::int64_t from_b = i < rank_b ? b.shape[rank_b - 1 - i] : 1;
    if (from_a != from_b && from_a != 1 && from_b != 1) {
      throw InputError(describe(a) + " and " + describe(b) +
                       " have batch dimensions that do not broadcast. Fix: make them equal, or 1");
    }
    shape[rank - 1 - i] = from_a == 1 ? from_b : from_a;
  }
  return rank;
}

std::int64_t batch_of(const Operand& operand) noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i + 2 < operand.rank; ++i) count *= operand.shape[i];
  return count;
}

Operand without_batch(const Operand& operand) {
  Operand matrix = operand;
  matrix.rank = 2;
  for (std::size_t i = 0; i < 2; ++i) {
    matrix.shape[i] = operand.shape[operand.rank - 2U + i];
    matrix.strides[i] = operand.strides[operand.rank - 2U + i];
  }
  return matrix;
}

bool joins_into_rows(const Operand& a) noexcept {
  std::int64_t stride = a.stride(1);
  std::int64_t length = a.size(1);
  bool known = length != 1;
  for (std::size_t i = a.rank - 2U; i-- > 0;) {
    if (a.shape[i] == 1) continue;
    if (known && a.strides[i] != stride * length) return false;
    if (!known) stride = a.strides[i];
    known = true;
    length *= a.shape[i];
  }
  return true;
}

}  // namespace

OpCall make_matmul(const MatmulInputs& inputs, const MatmulOptions& options) {
  check_inputs(inputs);
  const Operand& a = inputs.a;
  const Operand& b = inputs.b;
  OpCall call;
  call.begin(OpKind::kMatmul, Slot::kCount, a.device);
  call.desc.phase = options.phase;
  call.desc.attributes.activation = options.activation;
  call.desc.attributes.allow_tf32 = options.allow_tf32 && is_float(a.dtype, 32);
  call.desc.attributes.deterministic = options.deterministic;

  OutputSpec out;
  out.name = "out";
  out.slot = Slot::kOut;
  out.dtype = result_dtype(inputs, options);
  const std::size_t batch_rank = broadcast_batch(a, b, out.shape);
  out.rank = static_cast<std::uint8_t>(batch_rank + 2);
  out.shape[batch_rank] = a.size(1);
  out.shape[batch_rank + 1] = b.size(0);

  const std::int64_t batch_a = batch_of(a);
  const std::int64_t batch_b = batch_of(b);
  if (batch_b == 1 && joins_into_rows(a)) {
    call.set(Slot::kA, join_leading(a, 1));
    call.set(Slot::kB, without_batch(b));
    call.add_output(out, 1, true);
  } else {
    std::int64_t batch = 1;
    for (std::size_t i = 0; i < batch_rank; ++i) batch *= out.shape[i];
    for (const Operand* operand : {&a, &b}) {
      const std::int64_t own = operand == &a ? batch_a : batch_b;
      if (own == 1 && batch != 1) {
        call.set(operand == &a ? Slot::kA : Slot::kB, without_batch(*operand));
      } else if (own == batch) {
        call.set(operand == &a ? Slot::kA : Slot::kB, join_leading(*operand, 2));
      } else {
        throw InputError(describe(*operand) +
                         " would have to be repeated along some of its batch dimensions: only a "
                         "whole batch is broadcast. Fix: expand it and make it contiguous first");
      }
    }
    call.add_output(out, 2, true);
  }
  call.set(Slot::kBias, inputs.bias);
  call.set(Slot::kScaleA, inputs.scale_a);
  call.set(Slot::kScaleB, inputs.scale_b);
  return call;
}

}  // namespace xpuruntime

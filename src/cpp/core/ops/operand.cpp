// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/operand.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string>

#include "memory/memory_overlap.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

std::string list(std::span<const std::int64_t> values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  }
  return text + "]";
}

std::string quoted(const char* name) { return std::string("'") + name + "'"; }

std::uint8_t alignment_of(const void* data) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return static_cast<std::uint8_t>(std::min(std::countr_zero(address | 256U), 8));
}

// A dimension of one element has any stride, and so have all of an operand without elements. One
// value for all, so that equal work is described equally: as if the operand were row-major, or
// column-major where its last dimension is strided.
void settle_strides(TensorDesc& desc) noexcept {
  const int rank = desc.rank;
  if (std::find(desc.shape.begin(), desc.shape.begin() + rank, 0) != desc.shape.begin() + rank) {
    std::int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      desc.strides[static_cast<std::size_t>(i)] = stride;
      stride *= std::max<std::int64_t>(1, desc.shape[static_cast<std::size_t>(i)]);
    }
    return;
  }
  for (int i = rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (desc.shape[at] != 1) continue;
    if (i == rank - 1) {
      desc.strides[at] = 1;
    } else if (i == rank - 2 && desc.strides[at + 1] != 1) {
      desc.strides[at] = 1;
    } else {
      desc.strides[at] =
          std::max<std::int64_t>(1, desc.shape[at + 1] * std::abs(desc.strides[at + 1]));
    }
  }
}

// Whether no two elements can lie at one address.
bool is_free_of_overlap(const Operand& operand) noexcept {
  std::array<std::pair<std::int64_t, std::int64_t>, Operand::kMaxRank> dims{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < operand.rank; ++i) {
    if (operand.shape[i] == 0) return true;
    if (operand.shape[i] == 1) continue;
    const std::pair one{std::abs(operand.strides[i]), operand.shape[i]};
    std::size_t at = count++;
    for (; at > 0 && one < dims[at - 1]; --at) dims[at] = dims[at - 1];
    dims[at] = one;
  }
  std::int64_t reach = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (dims[i].first < reach) return false;
    reach = dims[i].first * (dims[i].second - 1) + reach;
  }
  return true;
}

bool is_norm(OpKind kind) noexcept {
  return kind == OpKind::kLayerNorm || kind == OpKind::kRmsNorm ||
         kind == OpKind::kLayerNormBackward || kind == OpKind::kRmsNormBackward;
}

bool same_place(const TensorDesc& left, const TensorDesc& right) noexcept {
  return left.rank == right.rank && left.shape == right.shape && left.strides == right.strides &&
         left.dtype == right.dtype;
}

}  // namespace

std::int64_t Operand::elements() const noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

std::string describe(const Operand& operand) {
  return quoted(operand.name) + " " + list({operand.shape.data(), operand.rank}) + " " +
         to_string(operand.dtype) + " on " + to_string(operand.device);
}

void set_dense_strides(Operand& operand) noexcept {
  std::int64_t dense = 1;
  for (std::size_t i = operand.rank; i-- > 0;) {
    operand.strides[i] = dense;
    dense *= operand.shape[i];
  }
}

OutputSpec output_like(const Operand& operand, const char* name, std::uint8_t slot) {
  OutputSpec spec;
  spec.name = name;
  spec.slot = slot;
  spec.dtype = operand.dtype;
  spec.rank = operand.rank;
  spec.shape = operand.shape;
  return spec;
}

void OpCall::begin(OpKind kind, std::size_t slots, DeviceId device) {
  desc.kind = kind;
  desc.slots = static_cast<std::uint8_t>(slots);
  desc.device = device;
}

void OpCall::set(std::size_t slot, const Operand& operand, std::span<const std::int64_t> shape,
                 std::span<const std::int64_t> strides) {
  if (reinterpret_cast<std::uintptr_t>(operand.data) % operand.dtype.itemsize() != 0) {
    throw InputError(describe(operand) + " lies at an address that is no multiple of its " +
                     std::to_string(operand.dtype.itemsize()) +
                     " bytes an element. Fix: copy it first");
  }
  TensorDesc& tensor = desc.tensors[slot];
  tensor.dtype = operand.dtype;
  tensor.present = 1;
  tensor.rank = static_cast<std::uint8_t>(shape.size());
  tensor.alignment = alignment_of(operand.data);
  std::copy(shape.begin(), shape.end(), tensor.shape.begin());
  std::copy(strides.begin(), strides.end(), tensor.strides.begin());
  settle_strides(tensor);
  data[slot] = operand.data;
  names_[slot] = operand.name;
}

void OpCall::set(std::size_t slot, const Operand& operand) {
  if (operand.absent) return;
  if (operand.rank > TensorDesc::kMaxRank) {
    throw InputError(describe(operand) + " has " + std::to_string(operand.rank) +
                     " dimensions, and at most " + std::to_string(TensorDesc::kMaxRank) +
                     " are possible here. Fix: reshape it");
  }
  set(slot, operand, {operand.shape.data(), operand.rank}, {operand.strides.data(), operand.rank});
}

void OpCall::add_output(const OutputSpec& spec, std::size_t keep, bool always_join) {
  outputs_[count_] = spec;
  shaping_[count_] = {keep, always_join};
  ++count_;
}

void OpCall::set_output(const OutputSpec& spec, const Operand& operand) {
  if (operand.rank != spec.rank ||
      !std::equal(spec.shape.begin(), spec.shape.begin() + spec.rank, operand.shape.begin())) {
    throw InputError(describe(operand) + " has the wrong shape: the result is " +
                     list(spec.dims()) + ". Fix: leave it out, or pass an array of that shape");
  }
  if (operand.dtype != spec.dtype) {
    throw InputError(describe(operand) + " has the wrong dtype: the result is " +
                     to_string(spec.dtype) + ". Fix: leave it out, or pass an array of that dtype");
  }
  if (operand.device != desc.device) {
    throw InputError(describe(operand) + " is on another device than the inputs, which are on " +
                     to_string(desc.device) + ". Fix: leave it out, or pass one on that device");
  }
  if (operand.readonly) {
    throw InputError(describe(operand) + " is read-only. Fix: pass one to write to");
  }
  if (!is_free_of_overlap(operand)) {
    throw InputError(
        describe(operand) +
        " has elements that share memory (a broadcast view?). Fix: pass a plain array");
  }
  const Shaping shaping = shaping_[static_cast<std::size_t>(
      std::find_if(outputs().begin(), outputs().end(),
                   [&](const OutputSpec& other) { return other.slot == spec.slot; }) -
      outputs().begin())];
  if (shaping.always_join || operand.rank > shaping.keep) {
    const Operand joined = join_leading(operand, shaping.keep);
    set(spec.slot, joined);
  } else {
    set(spec.slot, operand);
  }
  require_own_memory(spec.slot, operand);
}

void OpCall::require_own_memory(std::size_t slot, const Operand& operand) const {
  const TensorDesc& mine = desc.tensors[slot];
  for (std::size_t other = 0; other < desc.slots; ++other) {
    if (other == slot || !desc.has(other)) continue;
    const TensorDesc& theirs = desc.tensors[other];
    if (!shares_memory(mine, operand.data, theirs, data[other])) continue;
    const std::string name = quoted(names_[other]);
    if (is_output(desc.kind, other)) {
      throw InputError(describe(operand) + " shares memory with the result " + name +
                       ". Fix: pass another array");
    }
    // Norms read each element before they write it.
    if (is_norm(desc.kind) && data[other] == operand.data && same_place(mine, theirs)) continue;
    throw InputError(describe(operand) + " shares memory with " + name +
                     ", which would be overwritten while it is read. Fix: pass another array");
  }
}

bool OpCall::empty() const noexcept {
  return std::all_of(outputs().begin(), outputs().end(), [](const OutputSpec& spec) {
    return std::find(spec.dims().begin(), spec.dims().end(), 0) != spec.dims().end();
  });
}

Operand join_leading(const Operand& operand, std::size_t keep) {
  Operand joined = operand;
  const std::size_t leading = operand.rank > keep ? operand.rank - keep : 0;
  std::int64_t length = 1;
  std::int64_t stride = 0;
  bool known = false;
  for (std::size_t i = leading; i-- > 0;) {
    const std::int64_t size = operand.shape[i];
    if (size != 1 && known && length != 0 && operand.strides[i] != stride * length) {
      throw InputError(describe(operand) +
                       " has leading dimensions that cannot be joined without a copy. Fix: make it "
                       "contiguous first");
    }
    if (size != 1 && !known) {
      stride = operand.strides[i];
      known = true;
    }
    length *= size;
  }
  joined.rank = static_cast<std::uint8_t>(keep + 1);
  joined.shape[0] = length;
  joined.strides[0] = stride;
  for (std::size_t i = 0; i < keep; ++i) {
    joined.shape[1 + i] = operand.shape[leading + i];
    joined.strides[1 + i] = operand.strides[leading + i];
  }
  return joined;
}

void require_present(const Operand& operand) {
  if (operand.absent)
    throw InputError("the argument " + quoted(operand.name) + " is missing. Fix: pass it");
}

void require_same_device(const Operand& first, const Operand& second) {
  if (second.absent || first.device == second.device) return;
  throw InputError(describe(second) + " is on another device than " + describe(first) +
                   ". Fix: move one of them first");
}

void require_same_dtype(const Operand& first, const Operand& second) {
  if (second.absent || first.dtype == second.dtype) return;
  throw InputError(describe(second) + " has another dtype than " + describe(first) +
                   ": nothing is converted silently. Fix: convert one of them first");
}

void require_rank(const Operand& operand, std::size_t rank, const char* form) {
  if (operand.rank == rank) return;
  throw InputError(describe(operand) + " has " + std::to_string(operand.rank) +
                   " dimensions; expected " + form + ". Fix: reshape it");
}

bool is_real(DType dtype) noexcept {
  return is_bfloat(dtype) ||
         (dtype.code == 2 && (dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64));
}

}  // namespace xpuruntime

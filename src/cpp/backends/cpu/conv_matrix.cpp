// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/conv_matrix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>

#include "cpu/element.h"

namespace xpuruntime::cpu {
namespace {

// Elements of the matrix laid out for one block, and pixels that a block should have so that
// preparing the weights for it is worth it.
constexpr std::int64_t kMaxLaidOut = 512 * 1024;
constexpr std::int64_t kFewPixels = 96;

/// The stride between neighbours when some dimensions are walked as one, the last the fastest;
/// empty when they cannot be.
std::optional<std::int64_t> joined_stride(const View& tensor, std::span<const std::size_t> order) {
  std::int64_t stride = 1;
  std::int64_t expected = -1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::size_t at = order[i];
    if (tensor.shape[at] == 1) continue;
    if (expected < 0) {
      stride = tensor.strides[at];
    } else if (tensor.strides[at] != expected) {
      return std::nullopt;
    }
    expected = tensor.strides[at] * tensor.shape[at];
  }
  return stride;
}

constexpr std::array<std::size_t, 2> kPixels{2, 3};
constexpr std::array<std::size_t, 3> kTaps{1, 2, 3};
constexpr std::array<std::size_t, 3> kTapsChannelsLast{2, 3, 1};

std::string quoted(const OpDesc& op, std::size_t slot) {
  return "'" + std::string(slot_name(op.kind, slot)) + "'";
}

}  // namespace

ConvSize conv_size(const OpDesc& op) {
  const ConvSlots slot = conv_slots(op.kind);
  const auto& weight = op[slot.weight].shape;
  const auto& out = op[slot.out].shape;
  const std::int64_t groups = op.attributes.groups;
  return {groups, weight[1], weight[0] / groups, weight[1] * weight[2] * weight[3], out[2], out[3]};
}

std::optional<MatrixLayout> out_matrix(const OpDesc& op, const ConvSize& size) {
  const View out = view(op, conv_slots(op.kind).out, nullptr);
  const auto pixel = joined_stride(out, kPixels);
  if (!pixel) return std::nullopt;
  return matrix_layout(size.outputs, size.pixels(), out.strides[1], *pixel);
}

std::optional<WeightMatrix> weight_matrix(const OpDesc& op, const ConvSize& size) {
  const View weight = view(op, conv_slots(op.kind).weight, nullptr);
  for (const bool last : {false, true}) {
    const auto tap = joined_stride(weight, last ? kTapsChannelsLast : kTaps);
    if (!tap) continue;
    if (const auto found = matrix_layout(size.outputs, size.taps, weight.strides[0], *tap)) {
      return WeightMatrix{*found, last};
    }
  }
  return std::nullopt;
}

std::optional<MatrixLayout> plain_matrix(const OpDesc& op, const ConvSize& size) {
  const OpAttributes& at = op.attributes;
  const ConvSlots slot = conv_slots(op.kind);
  const View weight = view(op, slot.weight, nullptr);
  const View x = view(op, slot.x, nullptr);
  const bool pads =
      std::any_of(at.padding.begin(), at.padding.end(), [](auto n) { return n != 0; });
  if (weight.shape[2] != 1 || weight.shape[3] != 1 || at.stride[0] != 1 || at.stride[1] != 1 ||
      pads) {
    return std::nullopt;
  }
  const auto pixel = joined_stride(x, kPixels);
  if (!pixel) return std::nullopt;
  return matrix_layout(size.channels, size.pixels(), x.strides[1], *pixel);
}

Support check_out_matrix(const OpDesc& op, const ConvSize& size) {
  if (out_matrix(op, size)) return Support::yes();
  return Support::no("needs " + quoted(op, conv_slots(op.kind).out) +
                     " with the rows of an image one behind the other");
}

Support check_weight_matrix(const OpDesc& op, const ConvSize& size) {
  const auto found = weight_matrix(op, size);
  if (found && !found->channels_last) return Support::yes();
  return Support::no("needs " + quoted(op, conv_slots(op.kind).weight) +
                     " with its last three dimensions contiguous");
}

Support check_blas_dtype(const OpDesc& op) {
  const DType dtype = op[0].dtype;
  const Element element = *element_of(dtype);
  if (element == Element::kFp32 || element == Element::kFp64) return Support::yes();
  return Support::no("OpenBLAS multiplies fp32 and fp64, and this is " + to_string(dtype));
}

std::int64_t rows_of_block(const ConvSize& size, std::int64_t taps) {
  const std::int64_t wanted = std::max(kFewPixels, kMaxLaidOut / std::max<std::int64_t>(taps, 1));
  return std::clamp<std::int64_t>(wanted / std::max<std::int64_t>(size.width, 1), 1,
                                  std::max<std::int64_t>(size.height, 1));
}

template <typename T>
TapMatrix<T>::Tap TapMatrix<T>::tap(std::int64_t index) const noexcept {
  if (channels_last_) {
    const std::int64_t place = index / channels_;
    return {index % channels_, place / kernel_[1], place % kernel_[1]};
  }
  const std::int64_t area = kernel_[0] * kernel_[1];
  return {index / area, index % area / kernel_[1], index % kernel_[1]};
}

template <typename T>
TapMatrix<T>::Span TapMatrix<T>::span(std::int64_t j) const noexcept {
  const std::int64_t stride = at_.stride[1];
  const std::int64_t shift = j * at_.dilation[1] - at_.padding[1];
  const auto up = [stride](std::int64_t n) { return n <= 0 ? 0 : (n + stride - 1) / stride; };
  const std::int64_t first = std::min(up(-shift), width_);
  const std::int64_t last = std::clamp(up(x_.shape[3] - shift), first, width_);
  return {first, last, (first * stride + shift) * x_.strides[3], stride * x_.strides[3]};
}

template <typename T>
void TapMatrix<T>::lay_out(const T* x, const Block& block, T* matrix) const noexcept {
  for (std::int64_t index = block.first_tap; index < block.first_tap + block.taps; ++index) {
    const Tap at = tap(index);
    const Span inside = span(at.j);
    for (std::int64_t row = block.row; row < block.row + block.rows; ++row, matrix += width_) {
      const std::int64_t y = line(row, at.i);
      if (y < 0 || y >= x_.shape[2] || inside.first == inside.last) {
        std::fill(matrix, matrix + width_, T{0});
        continue;
      }
      std::fill(matrix, matrix + inside.first, T{0});
      const T* const from = x + at.channel * x_.strides[1] + y * x_.strides[2] + inside.from;
      const std::int64_t count = inside.last - inside.first;
      T* const to = matrix + inside.first;
      if (inside.step == 1) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
      } else {
        for (std::int64_t z = 0; z < count; ++z) to[z] = from[z * inside.step];
      }
      std::fill(matrix + inside.last, matrix + width_, T{0});
    }
  }
}

template <typename T>
void TapMatrix<T>::add_back(const T* matrix, const Block& block, T* x) const noexcept {
  for (std::int64_t index = block.first_tap; index < block.first_tap + block.taps; ++index) {
    const Tap at = tap(index);
    const Span inside = span(at.j);
    for (std::int64_t row = block.row; row < block.row + block.rows; ++row, matrix += width_) {
      const std::int64_t y = line(row, at.i);
      if (y < 0 || y >= x_.shape[2] || inside.first == inside.last) continue;
      T* const to = x + at.channel * x_.strides[1] + y * x_.strides[2] + inside.from;
      const T* const from = matrix + inside.first;
      for (std::int64_t z = 0; z < inside.last - inside.first; ++z) to[z * inside.step] += from[z];
    }
  }
}

template class TapMatrix<float>;
template class TapMatrix<double>;

}  // namespace xpuruntime::cpu

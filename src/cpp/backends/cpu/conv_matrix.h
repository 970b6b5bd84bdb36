// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/gemm.h"
#include "cpu/view.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

// A convolution and its gradients as products of matrices, one image and group at a time:
// out[outputs, pixels] = weight[outputs, taps] @ x[taps, pixels], where the matrix of x has what
// each tap (a channel and a place in the kernel) meets at each pixel of the result. x, weight and
// out are named by `conv_slots`, whichever of them is asked for.

struct ConvSize {
  std::int64_t groups, channels, outputs;  ///< channels in and out of one group
  std::int64_t taps;                       ///< channels * kernel height * kernel width
  std::int64_t height, width;              ///< of out
  std::int64_t pixels() const noexcept { return height * width; }
};
ConvSize conv_size(const OpDesc& op);

/// out of one image and group.
std::optional<MatrixLayout> out_matrix(const OpDesc& op, const ConvSize& size);

/// The weights of one group.
struct WeightMatrix {
  MatrixLayout layout;
  bool channels_last = false;  ///< taps count channels first, then the kernel
};
std::optional<WeightMatrix> weight_matrix(const OpDesc& op, const ConvSize& size);

/// x of one image and group as [channels, pixels], where that is the matrix in place.
std::optional<MatrixLayout> plain_matrix(const OpDesc& op, const ConvSize& size);

/// What every kernel here needs of out; and of weight with its channels first.
Support check_out_matrix(const OpDesc& op, const ConvSize& size);
Support check_weight_matrix(const OpDesc& op, const ConvSize& size);
/// fp32 or fp64.
Support check_blas_dtype(const OpDesc& op);

/// How many rows of out stand in one block of the matrix of x, of which `taps` rows are made at
/// once.
std::int64_t rows_of_block(const ConvSize& size, std::int64_t taps);

/// Part of the matrix of x: these taps at the pixels of these rows of out.
struct Block {
  std::int64_t first_tap, taps;
  std::int64_t row, rows;
};

/// The matrix of x of one image and group, which begins at `x`, and rows of which are made when
/// they are needed.
template <typename T>
class TapMatrix {
 public:
  TapMatrix(const OpDesc& op, const ConvSize& size, const View& x, bool channels_last = false)
      : at_(op.attributes),
        kernel_{op[conv_slots(op.kind).weight].shape[2], op[conv_slots(op.kind).weight].shape[3]},
        width_(size.width),
        channels_(size.channels),
        x_(x),
        channels_last_(channels_last) {}

  /// matrix[taps, rows * width], zero in the padding.
  void lay_out(const T* x, const Block& block, T* matrix) const noexcept;
  /// Adds the matrix to what it was made of.
  void add_back(const T* matrix, const Block& block, T* x) const noexcept;

 private:
  struct Tap {
    std::int64_t channel, i, j;
  };
  struct Span {
    std::int64_t first, last;  ///< pixels of a row of out that meet x
    std::int64_t from, step;   ///< where in a row of x the first does, and how far on the next
  };
  Tap tap(std::int64_t index) const noexcept;
  Span span(std::int64_t j) const noexcept;
  std::int64_t line(std::int64_t row, std::int64_t i) const noexcept {
    return row * at_.stride[0] + i * at_.dilation[0] - at_.padding[0];
  }

  const OpAttributes& at_;
  const std::int64_t kernel_[2];
  const std::int64_t width_, channels_;
  const View x_;
  const bool channels_last_;
};

}  // namespace xpuruntime::cpu

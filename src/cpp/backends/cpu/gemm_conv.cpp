// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/blas.h"
#include "cpu/element.h"
#include "cpu/gemm.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Conv;

// Elements of the matrix laid out for one block, and pixels that a block should have so that
// preparing the weights for it is worth it.
constexpr std::int64_t kMostLaidOut = 512 * 1024;
constexpr std::int64_t kFewPixels = 96;
constexpr std::int64_t kPerStep = 64;

/// The stride between neighbours when the dimensions [first, last) of a shape are walked as one;
/// empty when they cannot be.
std::optional<std::int64_t> joined_stride(const View& tensor, std::size_t first, std::size_t last) {
  std::int64_t stride = 1;
  std::int64_t expected = -1;
  for (std::size_t i = last; i-- > first;) {
    if (tensor.shape[i] == 1) continue;
    if (expected < 0) {
      stride = tensor.strides[i];
    } else if (tensor.strides[i] != expected) {
      return std::nullopt;
    }
    expected = tensor.strides[i] * tensor.shape[i];
  }
  return stride;
}

struct Geometry {
  std::int64_t groups, channels, outputs;  ///< channels in and out of one group
  std::int64_t taps;                       ///< channels * kernel height * kernel width
  std::int64_t height, width;              ///< of the result
};

Geometry geometry(const OpDesc& op) {
  const auto& weight = op[Slot::kWeight].shape;
  const auto& out = op[Slot::kOut].shape;
  const std::int64_t groups = op.attributes.groups;
  return {groups, weight[1], weight[0] / groups, weight[1] * weight[2] * weight[3], out[2], out[3]};
}

/// The result of one image and group as a matrix [channels, pixels].
std::optional<MatrixLayout> result_layout(const OpDesc& op, const Geometry& size) {
  const View out = view(op, Slot::kOut, nullptr);
  const auto pixel = joined_stride(out, 2, 4);
  if (!pixel) return std::nullopt;
  return matrix_layout(size.outputs, size.height * size.width, out.strides[1], *pixel);
}

std::optional<MatrixLayout> weight_layout(const OpDesc& op, const Geometry& size) {
  const View weight = view(op, Slot::kWeight, nullptr);
  const auto tap = joined_stride(weight, 1, 4);
  if (!tap) return std::nullopt;
  return matrix_layout(size.outputs, size.taps, weight.strides[0], *tap);
}

/// x of one image and group as a matrix [channels, pixels], where it is what the weights are
/// multiplied with.
std::optional<MatrixLayout> plain_layout(const OpDesc& op, const Geometry& size) {
  const OpAttributes& at = op.attributes;
  const View weight = view(op, Slot::kWeight, nullptr);
  const View x = view(op, Slot::kX, nullptr);
  const bool pads =
      std::any_of(at.padding.begin(), at.padding.end(), [](auto n) { return n != 0; });
  if (weight.shape[2] != 1 || weight.shape[3] != 1 || at.stride[0] != 1 || at.stride[1] != 1 ||
      pads) {
    return std::nullopt;
  }
  const auto pixel = joined_stride(x, 2, 4);
  if (!pixel) return std::nullopt;
  return matrix_layout(size.channels, size.height * size.width, x.strides[1], *pixel);
}

template <typename T>
class GemmConv final : public Kernel {
 public:
  explicit GemmConv(const OpDesc& op)
      : op_(op),
        blas_(OpenBlas::get()),
        size_(geometry(op)),
        plain_(plain_layout(op, size_)),
        workers_(thread_count()) {
    product_.m = size_.outputs;
    product_.k = size_.taps;
    product_.a_layout = *weight_layout(op, size_);
    product_.c_layout = *result_layout(op, size_);
    product_.activation = op.attributes.activation;
    const std::int64_t wanted =
        plain_ ? 1024 : std::max(kFewPixels, kMostLaidOut / std::max<std::int64_t>(size_.taps, 1));
    rows_ = std::clamp<std::int64_t>(wanted / std::max<std::int64_t>(size_.width, 1), 1,
                                     std::max<std::int64_t>(size_.height, 1));
    // One image alone still gives every thread something to do.
    const std::int64_t others = op[Slot::kOut].shape[0] * size_.groups;
    while (rows_ > 1 && others * pieces() < workers_ && rows_ * size_.width > kFewPixels) {
      rows_ = (rows_ + 1) / 2;
    }
  }

  std::size_t workspace_bytes() const noexcept override {
    if (plain_) return 0;
    return static_cast<std::size_t>(workers_ * size_.taps * rows_ * size_.width) * sizeof(T);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View x = view(op_, Slot::kX, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View out = view(op_, Slot::kOut, operands);
    const std::int64_t tasks = out.shape[0] * size_.groups * pieces();
    const std::int64_t steps = out.shape[0] * size_.groups * size_.height * size_.width *
                               size_.outputs * size_.taps / kPerStep;
    parallel_for(tasks, steps, [&](std::int64_t task, int worker) {
      const std::int64_t row = task % pieces() * rows_;
      const std::int64_t group = task / pieces() % size_.groups;
      const std::int64_t image = task / pieces() / size_.groups;
      const std::int64_t rows = std::min(rows_, size_.height - row);
      const T* const from = reinterpret_cast<const T*>(x.data) + image * x.strides[0] +
                            group * size_.channels * x.strides[1];
      Product<T> product = product_;
      product.n = rows * size_.width;
      product.a =
          reinterpret_cast<const T*>(weight.data) + group * size_.outputs * weight.strides[0];
      product.c = reinterpret_cast<T*>(out.data) + image * out.strides[0] +
                  group * size_.outputs * out.strides[1] + row * out.strides[2];
      if (op_.has(Slot::kBias)) {
        product.row_bias = static_cast<const T*>(operands[Slot::kBias]) + group * size_.outputs;
      }
      if (plain_) {
        product.b = from + row * x.strides[2];
        product.b_layout = *plain_;
      } else {
        T* const matrix = static_cast<T*>(workspace) + worker * size_.taps * rows_ * size_.width;
        lay_out(x, from, row, rows, matrix);
        product.b = matrix;
        product.b_layout = {false, std::max<std::int64_t>(product.n, 1)};
      }
      multiply_block(blas_, product, 0, product.m, 0, product.n);
    });
  }

 private:
  std::int64_t pieces() const noexcept { return (size_.height + rows_ - 1) / rows_; }

  // [taps, rows * width]: what each tap meets at each pixel, zero in the padding.
  void lay_out(const View& x, const T* from, std::int64_t row, std::int64_t rows,
               T* matrix) const noexcept {
    const auto& kernel = op_[Slot::kWeight].shape;
    const OpAttributes& at = op_.attributes;
    for (std::int64_t c = 0; c < size_.channels; ++c) {
      for (std::int64_t i = 0; i < kernel[2]; ++i) {
        for (std::int64_t j = 0; j < kernel[3]; ++j) {
          for (std::int64_t y = row; y < row + rows; ++y) {
            const std::int64_t line = y * at.stride[0] + i * at.dilation[0] - at.padding[0];
            if (line < 0 || line >= x.shape[2]) {
              std::fill(matrix, matrix + size_.width, T{0});
            } else {
              lay_out_line(x, from + c * x.strides[1] + line * x.strides[2],
                           j * at.dilation[1] - at.padding[1], matrix);
            }
            matrix += size_.width;
          }
        }
      }
    }
  }

  // out[z] = line[z * stride + shift] where that is inside, else 0.
  void lay_out_line(const View& x, const T* line, std::int64_t shift, T* out) const noexcept {
    const std::int64_t stride = op_.attributes.stride[1];
    const auto up = [stride](std::int64_t n) { return n <= 0 ? 0 : (n + stride - 1) / stride; };
    const std::int64_t first = std::min(up(-shift), size_.width);
    const std::int64_t last = std::clamp(up(x.shape[3] - shift), first, size_.width);
    std::fill(out, out + first, T{0});
    const std::int64_t step = stride * x.strides[3];
    const T* const source = line + (first * stride + shift) * x.strides[3];
    if (step == 1) {
      if (last > first) {
        std::memcpy(out + first, source, static_cast<std::size_t>(last - first) * sizeof(T));
      }
    } else {
      for (std::int64_t z = first; z < last; ++z) out[z] = source[(z - first) * step];
    }
    std::fill(out + last, out + size_.width, T{0});
  }

  const OpDesc op_;
  const OpenBlas& blas_;
  const Geometry size_;
  const std::optional<MatrixLayout> plain_;
  const std::int64_t workers_;
  Product<T> product_;
  std::int64_t rows_ = 1;  ///< of the result in one block
};

}  // namespace

Support gemm_conv_supports(const OpDesc& op) {
  const Element element = *element_of(op[Slot::kX].dtype);
  if (element != Element::kFp32 && element != Element::kFp64) {
    return Support::no("OpenBLAS multiplies fp32 and fp64, and this is " +
                       to_string(op[Slot::kX].dtype));
  }
  const Geometry size = geometry(op);
  if (!weight_layout(op, size)) {
    return Support::no("needs 'weight' with its last three dimensions contiguous");
  }
  if (!result_layout(op, size)) {
    return Support::no("needs 'out' with the rows of an image one behind the other");
  }
  const View bias = view(op, Slot::kBias, nullptr);
  if (bias && bias.shape[3] > 1 && bias.strides[3] != 1) {
    return Support::no("needs a contiguous bias, and its stride is " +
                       std::to_string(bias.strides[3]));
  }
  return Support::yes();
}

std::unique_ptr<const Kernel> gemm_conv(const OpDesc& op) {
  if (*element_of(op[Slot::kX].dtype) == Element::kFp64) {
    return std::make_unique<GemmConv<double>>(op);
  }
  return std::make_unique<GemmConv<float>>(op);
}

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <string>

#include "cpu/blas.h"
#include "cpu/conv_matrix.h"
#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Conv;

// Pixels below which a block is not cut further.
constexpr std::int64_t kFewPixels = 96;
constexpr std::int64_t kPlainPixels = 1024;
constexpr std::int64_t kPerStep = 64;

template <typename T>
class GemmConv final : public Kernel {
 public:
  explicit GemmConv(const OpDesc& op)
      : op_(op),
        blas_(OpenBlas::get()),
        size_(conv_size(op)),
        plain_(plain_matrix(op, size_)),
        workers_(thread_count()) {
    product_.m = size_.outputs;
    product_.k = size_.taps;
    product_.a_layout = weight_matrix(op, size_)->layout;
    product_.c_layout = *out_matrix(op, size_);
    product_.activation = op.attributes.activation;
    rows_ = plain_ ? std::clamp<std::int64_t>(kPlainPixels / std::max<std::int64_t>(size_.width, 1),
                                              1, std::max<std::int64_t>(size_.height, 1))
                   : rows_of_block(size_, size_.taps);
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
    const TapMatrix<T> taps(op_, size_, x);
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
        taps.lay_out(from, {0, size_.taps, row, rows}, matrix);
        product.b = matrix;
        product.b_layout = {false, std::max<std::int64_t>(product.n, 1)};
      }
      multiply_block(blas_, product, 0, product.m, 0, product.n);
    });
  }

 private:
  std::int64_t pieces() const noexcept { return (size_.height + rows_ - 1) / rows_; }

  const OpDesc op_;
  const OpenBlas& blas_;
  const ConvSize size_;
  const std::optional<MatrixLayout> plain_;
  const std::int64_t workers_;
  Product<T> product_;
  std::int64_t rows_ = 1;  ///< of the result in one block
};

}  // namespace

Support gemm_conv_supports(const OpDesc& op) {
  const ConvSize size = conv_size(op);
  for (const Support& support :
       {check_blas_dtype(op), check_weight_matrix(op, size), check_out_matrix(op, size)}) {
    if (!support.ok) return support;
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

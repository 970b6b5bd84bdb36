// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>

#include "cpu/blas.h"
#include "cpu/conv_matrix.h"
#include "cpu/element.h"
#include "cpu/thread_pool.h"

namespace xpuruntime::cpu {
namespace {

constexpr std::int64_t kPerStep = 64;

std::int64_t ceil_div(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

MatrixLayout flipped(MatrixLayout layout) { return {!layout.transposed, layout.stride}; }

template <typename T>
T* shifted(T* data, const MatrixLayout& layout, std::int64_t columns) {
  return data + (layout.transposed ? columns * layout.stride : columns);
}

std::int64_t images(const OpDesc& op) { return op[conv_slots(op.kind).out].shape[0]; }

std::int64_t steps(const OpDesc& op, const ConvSize& size) {
  return images(op) * size.groups * size.pixels() * size.outputs * size.taps / kPerStep;
}

/// x[taps, pixels] = weight^T @ grad_out, and what the taps of a place in x come to is added there.
/// A task has some channels of one image and group to itself.
template <typename T>
class GemmInputGradient final : public Kernel {
 public:
  using Slot = slots::ConvInputGradient;

  explicit GemmInputGradient(const OpDesc& op)
      : op_(op),
        blas_(OpenBlas::get()),
        size_(conv_size(op)),
        plain_(plain_matrix(op, size_)),
        area_(op[Slot::kWeight].shape[2] * op[Slot::kWeight].shape[3]),
        workers_(thread_count()) {
    product_.k = size_.outputs;
    product_.a_layout = flipped(weight_matrix(op, size_)->layout);
    product_.b_layout = *out_matrix(op, size_);
    channels_ = std::max<std::int64_t>(size_.channels, 1);
    const std::int64_t others = std::max<std::int64_t>(images(op) * size_.groups, 1);
    while (channels_ > 1 && others * pieces() < workers_) channels_ = ceil_div(channels_, 2);
    rows_ =
        plain_ ? std::max<std::int64_t>(size_.height, 1) : rows_of_block(size_, channels_ * area_);
  }

  std::size_t workspace_bytes() const noexcept override {
    if (plain_) return 0;
    return static_cast<std::size_t>(workers_ * per_worker()) * sizeof(T);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View grad_out = view(op_, Slot::kGradOut, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View grad_x = view(op_, Slot::kGradX, operands);
    const TapMatrix<T> taps(op_, size_, grad_x);
    const std::int64_t tasks = grad_x.shape[0] * size_.groups * pieces();
    parallel_for(tasks, steps(op_, size_), [&](std::int64_t task, int worker) {
      const std::int64_t first = task % pieces() * channels_;
      const std::int64_t group = task / pieces() % size_.groups;
      const std::int64_t image = task / pieces() / size_.groups;
      const std::int64_t channels = std::min(channels_, size_.channels - first);
      T* const to = reinterpret_cast<T*>(grad_x.data) + image * grad_x.strides[0] +
                    group * size_.channels * grad_x.strides[1];
      const T* const from = reinterpret_cast<const T*>(grad_out.data) +
                            image * grad_out.strides[0] +
                            group * size_.outputs * grad_out.strides[1];
      Product<T> product = product_;
      product.m = channels * area_;
      product.a = shifted(
          reinterpret_cast<const T*>(weight.data) + group * size_.outputs * weight.strides[0],
          flipped(product.a_layout), first * area_);
      if (plain_) {
        product.n = size_.pixels();
        product.b = from;
        product.c = to + first * grad_x.strides[1];
        product.c_layout = *plain_;
        multiply_block(blas_, product, 0, product.m, 0, product.n);
        return;
      }
      clear(grad_x, to, first, channels);
      T* const matrix = static_cast<T*>(workspace) + worker * per_worker();
      for (std::int64_t row = 0; row < size_.height; row += rows_) {
        const std::int64_t rows = std::min(rows_, size_.height - row);
        product.n = rows * size_.width;
        product.b = from + row * grad_out.strides[2];
        product.c = matrix;
        product.c_layout = {false, std::max<std::int64_t>(product.n, 1)};
        multiply_block(blas_, product, 0, product.m, 0, product.n);
        taps.add_back(matrix, {first * area_, product.m, row, rows}, to);
      }
    });
  }

 private:
  std::int64_t pieces() const noexcept { return ceil_div(size_.channels, channels_); }
  std::int64_t per_worker() const noexcept { return channels_ * area_ * rows_ * size_.width; }

  static void clear(const View& x, T* to, std::int64_t first, std::int64_t channels) noexcept {
    for (std::int64_t c = first; c < first + channels; ++c) {
      for (std::int64_t y = 0; y < x.shape[2]; ++y) {
        T* const line = to + c * x.strides[1] + y * x.strides[2];
        for (std::int64_t z = 0; z < x.shape[3]; ++z) line[z * x.strides[3]] = T{0};
      }
    }
  }

  const OpDesc op_;
  const OpenBlas& blas_;
  const ConvSize size_;
  const std::optional<MatrixLayout> plain_;
  const std::int64_t area_;  ///< places in the kernel
  const std::int64_t workers_;
  Product<T> product_;
  std::int64_t channels_ = 1;  ///< of one task
  std::int64_t rows_ = 1;      ///< of grad_out in one block
};

/// weight[outputs, taps] = sum over images of grad_out @ x^T. A task has some taps of one group to
/// itself, and goes through the images in their order.
template <typename T>
class GemmWeightGradient final : public Kernel {
 public:
  using Slot = slots::ConvWeightGradient;

  explicit GemmWeightGradient(const OpDesc& op)
      : op_(op),
        blas_(OpenBlas::get()),
        size_(conv_size(op)),
        plain_(plain_matrix(op, size_)),
        weight_(*weight_matrix(op, size_)),
        workers_(thread_count()) {
    product_.m = size_.outputs;
    product_.a_layout = *out_matrix(op, size_);
    product_.c_layout = weight_.layout;
    const std::int64_t wanted = ceil_div(kTasksPerWorker * workers_, size_.groups);
    taps_ = std::max(ceil_div(size_.taps, std::max<std::int64_t>(wanted, 1)), kFewTaps);
    taps_ = std::clamp<std::int64_t>(size_.taps, 1, taps_);
    rows_ = plain_ ? std::max<std::int64_t>(size_.height, 1) : rows_of_block(size_, taps_);
  }

  std::size_t workspace_bytes() const noexcept override {
    if (plain_) return 0;
    return static_cast<std::size_t>(workers_ * per_worker()) * sizeof(T);
  }

  void launch(void* const* operands, void* workspace, StreamHandle /*stream*/) const override {
    const View grad_out = view(op_, Slot::kGradOut, operands);
    const View x = view(op_, Slot::kX, operands);
    const View grad_weight = view(op_, Slot::kGradWeight, operands);
    const TapMatrix<T> matrices(op_, size_, x, weight_.channels_last);
    parallel_for(size_.groups * pieces(), steps(op_, size_), [&](std::int64_t task, int worker) {
      const std::int64_t first = task % pieces() * taps_;
      const std::int64_t group = task / pieces();
      Product<T> product = product_;
      product.n = std::min(taps_, size_.taps - first);
      product.c = shifted(
          reinterpret_cast<T*>(grad_weight.data) + group * size_.outputs * grad_weight.strides[0],
          product.c_layout, first);
      multiply_block(blas_, product, 0, product.m, 0, product.n);  // nothing yet: zeros
      product.accumulate = true;
      T* const matrix = static_cast<T*>(workspace) + worker * per_worker();
      for (std::int64_t image = 0; image < x.shape[0]; ++image) {
        const T* const from = reinterpret_cast<const T*>(x.data) + image * x.strides[0] +
                              group * size_.channels * x.strides[1];
        const T* const arriving = reinterpret_cast<const T*>(grad_out.data) +
                                  image * grad_out.strides[0] +
                                  group * size_.outputs * grad_out.strides[1];
        for (std::int64_t row = 0; row < size_.height; row += rows_) {
          const std::int64_t rows = std::min(rows_, size_.height - row);
          product.k = rows * size_.width;
          product.a = arriving + row * grad_out.strides[2];
          if (plain_) {
            product.b = from + first * x.strides[1];
            product.b_layout = flipped(*plain_);
          } else {
            matrices.lay_out(from, {first, product.n, row, rows}, matrix);
            product.b = matrix;
            product.b_layout = {true, std::max<std::int64_t>(product.k, 1)};
          }
          multiply_block(blas_, product, 0, product.m, 0, product.n);
        }
      }
    });
  }

 private:
  static constexpr std::int64_t kTasksPerWorker = 2;
  static constexpr std::int64_t kFewTaps = 16;

  std::int64_t pieces() const noexcept { return ceil_div(size_.taps, taps_); }
  std::int64_t per_worker() const noexcept { return taps_ * rows_ * size_.width; }

  const OpDesc op_;
  const OpenBlas& blas_;
  const ConvSize size_;
  const std::optional<MatrixLayout> plain_;
  const WeightMatrix weight_;
  const std::int64_t workers_;
  Product<T> product_;
  std::int64_t taps_ = 1;  ///< of one task
  std::int64_t rows_ = 1;  ///< of grad_out in one block
};

template <template <typename> typename Kind>
std::unique_ptr<const Kernel> make(const OpDesc& op) {
  if (*element_of(op[0].dtype) == Element::kFp64) return std::make_unique<Kind<double>>(op);
  return std::make_unique<Kind<float>>(op);
}

}  // namespace

Support gemm_conv_input_gradient_supports(const OpDesc& op) {
  const ConvSize size = conv_size(op);
  for (const Support& support :
       {check_blas_dtype(op), check_weight_matrix(op, size), check_out_matrix(op, size)}) {
    if (!support.ok) return support;
  }
  return Support::yes();
}

std::unique_ptr<const Kernel> gemm_conv_input_gradient(const OpDesc& op) {
  return make<GemmInputGradient>(op);
}

Support gemm_conv_weight_gradient_supports(const OpDesc& op) {
  const ConvSize size = conv_size(op);
  for (const Support& support : {check_blas_dtype(op), check_out_matrix(op, size)}) {
    if (!support.ok) return support;
  }
  if (weight_matrix(op, size)) return Support::yes();
  return Support::no("needs 'grad_weight' contiguous or channels last");
}

std::unique_ptr<const Kernel> gemm_conv_weight_gradient(const OpDesc& op) {
  return make<GemmWeightGradient>(op);
}

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

/// Where along one dimension of the result, if anywhere, the kernel's place `tap` meets x at `at`.
std::int64_t meets(std::int64_t at, std::int64_t tap, const OpAttributes& given, std::size_t dim,
                   std::int64_t size) noexcept {
  const std::int64_t shifted = at + given.padding[dim] - tap * given.dilation[dim];
  if (shifted < 0 || shifted % given.stride[dim] != 0) return -1;
  const std::int64_t found = shifted / given.stride[dim];
  return found < size ? found : -1;
}

class ReferenceInputGradient final : public Kernel {
 public:
  using Slot = slots::ConvInputGradient;

  explicit ReferenceInputGradient(const OpDesc& op) : op_(op) {}

  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    const View grad_out = view(op_, Slot::kGradOut, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View grad_x = view(op_, Slot::kGradX, operands);
    const std::int64_t channels = grad_x.shape[1];
    const std::int64_t tasks = grad_x.shape[0] * channels;
    const std::int64_t terms =
        weight.shape[0] / op_.attributes.groups * weight.shape[2] * weight.shape[3];
    parallel_for(tasks, tasks * grad_x.shape[2] * grad_x.shape[3] * terms,
                 [&](std::int64_t task, int) {
                   for (std::int64_t y = 0; y < grad_x.shape[2]; ++y) {
                     for (std::int64_t z = 0; z < grad_x.shape[3]; ++z) {
                       grad_x.set(task / channels, task % channels, y, z,
                                  sum(grad_out, weight, task / channels, task % channels, y, z));
                     }
                   }
                 });
  }

 private:
  double sum(const View& grad_out, const View& weight, std::int64_t image, std::int64_t channel,
             std::int64_t y, std::int64_t z) const noexcept {
    const OpAttributes& at = op_.attributes;
    const std::int64_t outputs = weight.shape[0] / at.groups;
    const std::int64_t first = channel / weight.shape[1] * outputs;
    double total = 0;
    for (std::int64_t i = 0; i < weight.shape[2]; ++i) {
      const std::int64_t row = meets(y, i, at, 0, grad_out.shape[2]);
      if (row < 0) continue;
      for (std::int64_t j = 0; j < weight.shape[3]; ++j) {
        const std::int64_t column = meets(z, j, at, 1, grad_out.shape[3]);
        if (column < 0) continue;
        for (std::int64_t o = first; o < first + outputs; ++o) {
          total +=
              grad_out.get(image, o, row, column) * weight.get(o, channel % weight.shape[1], i, j);
        }
      }
    }
    return total;
  }

  const OpDesc op_;
};

class ReferenceWeightGradient final : public Kernel {
 public:
  using Slot = slots::ConvWeightGradient;

  explicit ReferenceWeightGradient(const OpDesc& op) : op_(op) {}

  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    const View grad_out = view(op_, Slot::kGradOut, operands);
    const View x = view(op_, Slot::kX, operands);
    const View grad_weight = view(op_, Slot::kGradWeight, operands);
    const std::int64_t channels = grad_weight.shape[1];
    const std::int64_t tasks = grad_weight.shape[0] * channels;
    const std::int64_t terms = x.shape[0] * grad_out.shape[2] * grad_out.shape[3];
    parallel_for(tasks, tasks * grad_weight.shape[2] * grad_weight.shape[3] * terms,
                 [&](std::int64_t task, int) {
                   for (std::int64_t i = 0; i < grad_weight.shape[2]; ++i) {
                     for (std::int64_t j = 0; j < grad_weight.shape[3]; ++j) {
                       grad_weight.set(task / channels, task % channels, i, j,
                                       sum(grad_out, x, task / channels, task % channels, i, j));
                     }
                   }
                 });
  }

 private:
  double sum(const View& grad_out, const View& x, std::int64_t output, std::int64_t channel,
             std::int64_t i, std::int64_t j) const noexcept {
    const OpAttributes& at = op_.attributes;
    const std::int64_t per_group = grad_out.shape[1] / at.groups;
    const std::int64_t from = output / per_group * (x.shape[1] / at.groups) + channel;
    double total = 0;
    for (std::int64_t image = 0; image < x.shape[0]; ++image) {
      for (std::int64_t row = 0; row < grad_out.shape[2]; ++row) {
        const std::int64_t y = row * at.stride[0] + i * at.dilation[0] - at.padding[0];
        if (y < 0 || y >= x.shape[2]) continue;
        for (std::int64_t column = 0; column < grad_out.shape[3]; ++column) {
          const std::int64_t z = column * at.stride[1] + j * at.dilation[1] - at.padding[1];
          if (z < 0 || z >= x.shape[3]) continue;
          total += grad_out.get(image, output, row, column) * x.get(image, from, y, z);
        }
      }
    }
    return total;
  }

  const OpDesc op_;
};

}  // namespace

std::unique_ptr<const Kernel> reference_conv_input_gradient(const OpDesc& op) {
  return std::make_unique<ReferenceInputGradient>(op);
}

std::unique_ptr<const Kernel> reference_conv_weight_gradient(const OpDesc& op) {
  return std::make_unique<ReferenceWeightGradient>(op);
}

}  // namespace xpuruntime::cpu

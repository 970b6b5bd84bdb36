// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/activation.h"
#include "cpu/reference.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Conv;

class ReferenceConv final : public Kernel {
 public:
  explicit ReferenceConv(const OpDesc& op) : op_(op) {}

  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    const View x = view(op_, Slot::kX, operands);
    const View weight = view(op_, Slot::kWeight, operands);
    const View bias = view(op_, Slot::kBias, operands);
    const View out = view(op_, Slot::kOut, operands);
    const std::int64_t channels = out.shape[1];
    const std::int64_t pixels = out.shape[2] * out.shape[3];
    const std::int64_t taps = weight.shape[1] * weight.shape[2] * weight.shape[3];
    const std::int64_t tasks = out.shape[0] * channels;
    parallel_for(tasks, tasks * pixels * taps, [&](std::int64_t task, int) {
      const std::int64_t image = task / channels;
      const std::int64_t channel = task % channels;
      const double start = bias ? bias.get(channel) : 0.0;
      for (std::int64_t row = 0; row < out.shape[2]; ++row) {
        for (std::int64_t column = 0; column < out.shape[3]; ++column) {
          const double value = start + sum(x, weight, image, channel, row, column);
          out.set(image, channel, row, column, activate(op_.attributes.activation, value));
        }
      }
    });
  }

 private:
  double sum(const View& x, const View& weight, std::int64_t image, std::int64_t channel,
             std::int64_t row, std::int64_t column) const noexcept {
    const OpAttributes& at = op_.attributes;
    const std::int64_t first =
        channel / (weight.shape[0] / at.groups) * weight.shape[1];  // input channel of the group
    double total = 0;
    for (std::int64_t i = 0; i < weight.shape[2]; ++i) {
      const std::int64_t y = row * at.stride[0] + i * at.dilation[0] - at.padding[0];
      if (y < 0 || y >= x.shape[2]) continue;
      for (std::int64_t j = 0; j < weight.shape[3]; ++j) {
        const std::int64_t z = column * at.stride[1] + j * at.dilation[1] - at.padding[1];
        if (z < 0 || z >= x.shape[3]) continue;
        for (std::int64_t c = 0; c < weight.shape[1]; ++c) {
          total += x.get(image, first + c, y, z) * weight.get(channel, c, i, j);
        }
      }
    }
    return total;
  }

  const OpDesc op_;
};

}  // namespace

std::unique_ptr<const Kernel> reference_conv(const OpDesc& op) {
  return std::make_unique<ReferenceConv>(op);
}

}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cmath>

#include "cpu_kernels.h"
#include "xpuruntime/conv_op.h"

namespace xpuruntime::testing {
namespace {

struct Conv {
  std::int64_t images, channels, height, width, outputs, kernel_h, kernel_w;
  ConvOptions options;
  bool channels_last;
};

void check_conv(const std::string& id, DType dtype, const Conv& at) {
  std::mt19937 random(9);
  const auto order = at.channels_last ? std::vector<std::size_t>{0, 2, 3, 1}
                                      : std::vector<std::size_t>{0, 1, 2, 3};
  Array x(dtype, {at.images, at.channels, at.height, at.width}, order);
  Array weight(dtype, {at.outputs, at.channels / at.options.groups, at.kernel_h, at.kernel_w});
  Array bias(dtype, {at.outputs});
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  OpCall call = make_conv(
      {.x = x.operand("x"), .weight = weight.operand("weight"), .bias = bias.operand("bias")},
      at.options);
  const OutputSpec spec = call.outputs()[0];
  Array out(dtype, {spec.shape[0], spec.shape[1], spec.shape[2], spec.shape[3]}, order);
  set_outputs(call, {&out});
  run_kernel(cpu_registry(), id, call);
  ASSERT_TRUE(out.guards_hold());
  // Every input goes to the outputs that it reaches.
  std::vector<double> want(static_cast<std::size_t>(out.count()));
  std::vector<double> size(want.size());
  const Dims& shape = out.shape();
  const auto index = [&](std::int64_t n, std::int64_t c, std::int64_t y, std::int64_t z) {
    return static_cast<std::size_t>(((n * shape[1] + c) * shape[2] + y) * shape[3] + z);
  };
  const std::int64_t per_in = at.channels / at.options.groups;
  const std::int64_t per_out = at.outputs / at.options.groups;
  for (std::int64_t n = 0; n < at.images; ++n) {
    for (std::int64_t c = 0; c < at.channels; ++c) {
      for (std::int64_t y = 0; y < at.height; ++y) {
        for (std::int64_t z = 0; z < at.width; ++z) {
          for (std::int64_t i = 0; i < at.kernel_h; ++i) {
            for (std::int64_t j = 0; j < at.kernel_w; ++j) {
              const std::int64_t oy = y + at.options.padding[0] - i * at.options.dilation[0];
              const std::int64_t oz = z + at.options.padding[1] - j * at.options.dilation[1];
              if (oy < 0 || oz < 0 || oy % at.options.stride[0] != 0 ||
                  oz % at.options.stride[1] != 0 || oy / at.options.stride[0] >= shape[2] ||
                  oz / at.options.stride[1] >= shape[3]) {
                continue;
              }
              for (std::int64_t o = 0; o < per_out; ++o) {
                const std::int64_t channel = c / per_in * per_out + o;
                const double term = x.at({n, c, y, z}) * weight.at({channel, c % per_in, i, j});
                const std::size_t to =
                    index(n, channel, oy / at.options.stride[0], oz / at.options.stride[1]);
                want[to] += term;
                size[to] += std::abs(term);
              }
            }
          }
        }
      }
    }
  }
  for (std::int64_t i = 0; i < out.count(); ++i) {
    const double b = bias.get(i / (shape[2] * shape[3]) % shape[1]);
    double value = want[static_cast<std::size_t>(i)] + b;
    if (at.options.activation == Activation::kRelu) value = std::max(value, 0.0);
    ASSERT_NEAR(out.get(i), value,
                4 * epsilon(dtype) * (size[static_cast<std::size_t>(i)] + std::abs(b)))
        << id << " " << i;
  }
}

ConvOptions options(std::array<std::int32_t, 2> stride, std::array<std::int32_t, 4> padding,
                    std::array<std::int32_t, 2> dilation = {1, 1}, std::int32_t groups = 1) {
  ConvOptions out;
  out.stride = stride;
  out.padding = padding;
  out.dilation = dilation;
  out.groups = groups;
  out.activation = Activation::kRelu;
  return out;
}

TEST(CpuConv, Conv) {
  for (const bool last : {false, true}) {
    const std::vector<Conv> cases = {
        {2, 3, 9, 11, 5, 3, 3, options({1, 1}, {1, 1, 1, 1}), last},
        {1, 4, 10, 7, 6, 3, 2, options({2, 3}, {0, 1, 2, 3}), last},
        {1, 4, 13, 12, 6, 3, 3, options({1, 2}, {2, 0, 1, 4}, {2, 3}, 2), last},
        {2, 6, 8, 8, 6, 3, 3, options({1, 1}, {1, 1, 1, 1}, {1, 1}, 6), last},
        {2, 5, 7, 9, 3, 1, 1, options({1, 1}, {0, 0, 0, 0}), last},
        {1, 6, 7, 9, 4, 1, 1, options({2, 2}, {0, 0, 0, 0}, {1, 1}, 2), last},
        {1, 2, 1, 1, 3, 1, 1, options({1, 1}, {4, 4, 4, 4}), last},
        {1, 1, 5, 40, 1, 5, 7, options({1, 1}, {6, 9, 6, 9}), last},
        {0, 3, 4, 4, 2, 3, 3, options({1, 1}, {0, 0, 0, 0}), last},
        {1, 0, 4, 4, 2, 3, 3, options({1, 1}, {0, 0, 0, 0}), last},
        {3, 8, 30, 31, 16, 3, 3, options({1, 1}, {1, 1, 1, 1}), last},
    };
    for (const Conv& at : cases) {
      for (const DType dtype : {kFp64, kFp32, kFp16, kBf16}) check_conv("cpu.reference", dtype, at);
      for (const DType dtype : {kFp64, kFp32}) check_conv("cpu.gemm_conv", dtype, at);
    }
  }
}

}  // namespace
}  // namespace xpuruntime::testing

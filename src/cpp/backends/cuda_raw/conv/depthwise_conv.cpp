// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/conv/depthwise_conv.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda_raw/conv/depthwise_plan.h"

namespace xpuruntime::cuda_raw {
namespace {

// Places in a plane are 32-bit numbers in the fast kernels, with a window and padding to add.
constexpr std::int64_t kMostAcross = std::int64_t{1} << 28;

std::uintptr_t size_of(ConvType type) noexcept { return type == ConvType::fp32 ? 4 : 2; }

bool fast_window(const DepthwiseConvArgs& args) noexcept {
  const std::int64_t down = args.kernel[0];
  return down == args.kernel[1] && (down == 3 || down == 5 || down == 7) &&
         args.stride[0] == args.stride[1] && args.stride[0] <= 2 && args.dilation[0] == 1 &&
         args.dilation[1] == 1;
}

bool fits_in_32_bits(const DepthwiseConvArgs& args) noexcept {
  for (std::size_t i = 0; i < 2; ++i) {
    if (args.size[i] > kMostAcross || args.out_size[i] > kMostAcross ||
        args.padding[i] > kMostAcross) {
      return false;
    }
  }
  return true;
}

bool adjacent(std::int64_t size, std::int64_t stride) noexcept { return size <= 1 || stride == 1; }

// More blocks than these are not planned for any strip.
bool few_tiles(const DepthwiseConvArgs& args) noexcept {
  const std::int64_t of_plane =
      conv::ceil_div(args.out_size[0], 2) * conv::ceil_div(args.out_size[1], 4);
  const std::int64_t planes = args.batch * args.channels;
  return planes <= INT32_MAX && (of_plane == 0 || planes <= INT32_MAX / of_plane);
}

// Every pair of channels at an address that is a multiple of its size.
bool in_pairs(const DepthwiseConvArgs& args) noexcept {
  const auto even = [&](const void* address, const std::int64_t (&strides)[4]) {
    return reinterpret_cast<std::uintptr_t>(address) % (2 * size_of(args.type)) == 0 &&
           strides[1] == 1 && strides[0] % 2 == 0 && strides[2] % 2 == 0 && strides[3] % 2 == 0;
  };
  return args.channels % 2 == 0 && args.channels > 0 && even(args.x, args.x_strides) &&
         even(args.out, args.out_strides);
}

}  // namespace

DepthwiseRoute depthwise_conv_route(const DepthwiseConvArgs& args) noexcept {
  if (!fast_window(args) || !fits_in_32_bits(args)) return DepthwiseRoute::general;
  if (adjacent(args.size[1], args.x_strides[3]) &&
      adjacent(args.out_size[1], args.out_strides[3]) && few_tiles(args)) {
    return DepthwiseRoute::rows;
  }
  if (in_pairs(args) && conv::count_spans(args, 1) <= INT32_MAX) return DepthwiseRoute::channels;
  return DepthwiseRoute::general;
}

std::string depthwise_conv_refusal(const DepthwiseConvArgs& args, int cc_major) {
  if (cc_major < 8) {
    return "the device has compute capability " + std::to_string(cc_major) +
           ".x and this kernel needs 8.0: use another kernel";
  }
  const std::uintptr_t size = size_of(args.type);
  const struct {
    const char* name;
    const void* address;
  } tensors[] = {{"x", args.x}, {"weight", args.weight}, {"bias", args.bias}, {"out", args.out}};
  for (const auto& [name, address] : tensors) {
    if (reinterpret_cast<std::uintptr_t>(address) % size == 0) continue;
    return std::string("'") + name + "' is not aligned to its own element of " +
           std::to_string(size) + " bytes: copy it to aligned memory";
  }
  return {};
}

}  // namespace xpuruntime::cuda_raw

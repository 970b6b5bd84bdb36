// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_raw/conv/depthwise_conv.h"

// How a depthwise convolution is cut into blocks. Plain C++, so that it can be checked without a
// device.
namespace xpuruntime::cuda_raw::conv {

constexpr int kTileThreads = 256;
constexpr int kMaxPlanes = 32;
constexpr int kTileBytes = 40 * 1024;  ///< of x in shared memory; with the rest below 48 KiB

/// One thread computes a strip of results: kColumns wide and kRows high.
template <int kWindow, int kStride>
struct Strip {
  static constexpr int kColumns = 4;
  static constexpr int kRows = kStride == 1 ? 4 : 2;
  static constexpr int kInputRows = (kRows - 1) * kStride + kWindow;
  static constexpr int kInputColumns = (kColumns - 1) * kStride + kWindow;
  static constexpr int kFours = (kInputColumns + 3) / 4;  ///< reads of four floats for a row
  static constexpr int kWeights = kWindow * kWindow;
  static constexpr int kWeightPitch = (kWeights + 3) / 4 * 4;
};

/// Divides numbers below 2^16 by one of at most 2^16, with one multiplication.
struct Divisor {
  std::uint32_t by = 1;
  std::uint32_t factor = 0;
};

constexpr Divisor make_divisor(std::uint32_t by) noexcept {
  return {by, by == 1 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + by - 1) / by)};
}

/// Blocks of the route `rows`: each computes strips_y x strips_x strips of `planes` planes, where a
/// plane is one channel of one image.
struct TilePlan {
  int strips_x = 1, strips_y = 1;  ///< of a plane, in one block
  int tiles_x = 1, tiles_y = 1;    ///< blocks that share a plane
  int planes = 1;                  ///< in one block; more than one only where it is not shared
  int input_rows = 0;              ///< of a plane in shared memory
  int input_pitch = 0;             ///< floats from one to the next, a multiple of 4
  std::int64_t groups = 0;         ///< of planes
  Divisor by_fours, by_input_rows, by_strips, by_strips_x;

  int threads() const noexcept { return (planes * strips_x * strips_y + 31) / 32 * 32; }
  int floats() const noexcept { return planes * input_rows * input_pitch; }
  std::int64_t blocks() const noexcept { return groups * tiles_x * tiles_y; }
};

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t by) noexcept {
  return (value + by - 1) / by;
}

/// The largest part when `count` is cut into the fewest parts of at most `most`, all about equal.
constexpr int even_part(std::int64_t count, std::int64_t most) noexcept {
  return static_cast<int>(ceil_div(count, ceil_div(count, most)));
}

/// `out_size` has an element.
template <int kWindow, int kStride>
TilePlan plan_tiles(const DepthwiseConvArgs& args, int sm_count) noexcept {
  using S = Strip<kWindow, kStride>;
  constexpr int kMostAcross = 32;
  const std::int64_t across = ceil_div(args.out_size[1], S::kColumns);
  const std::int64_t down = ceil_div(args.out_size[0], S::kRows);
  const std::int64_t planes = args.batch * args.channels;
  TilePlan plan;
  plan.strips_x = even_part(across, kMostAcross);
  int most_down = kTileThreads / plan.strips_x;
  const auto measure = [&] {
    plan.input_rows = (plan.strips_y * S::kRows - 1) * kStride + kWindow;
    plan.input_pitch = (plan.strips_x - 1) * S::kColumns * kStride + 4 * S::kFours;
  };
  for (;; most_down = (most_down + 1) / 2) {
    plan.strips_y = even_part(down, most_down);
    measure();
    if (most_down == 1 || plan.floats() * 4 <= kTileBytes) break;
  }
  plan.tiles_x = static_cast<int>(ceil_div(across, plan.strips_x));
  plan.tiles_y = static_cast<int>(ceil_div(down, plan.strips_y));
  if (plan.tiles_x == 1 && plan.tiles_y == 1) {
    const int by_threads = kTileThreads / (plan.strips_x * plan.strips_y);
    const int by_bytes = kTileBytes / (plan.floats() * 4);
    // A small batch is spread over the device before blocks are filled.
    const std::int64_t by_blocks = ceil_div(planes, 2 * std::max(sm_count, 1));
    plan.planes = static_cast<int>(std::clamp<std::int64_t>(
        std::min<std::int64_t>(by_blocks, std::min(by_threads, by_bytes)), 1, kMaxPlanes));
  }
  plan.groups = ceil_div(planes, plan.planes);
  plan.by_fours = make_divisor(static_cast<std::uint32_t>(plan.input_pitch / 4));
  plan.by_input_rows = make_divisor(static_cast<std::uint32_t>(plan.input_rows));
  plan.by_strips = make_divisor(static_cast<std::uint32_t>(plan.strips_x * plan.strips_y));
  plan.by_strips_x = make_divisor(static_cast<std::uint32_t>(plan.strips_x));
  return plan;
}

/// The route `channels`: a warp computes kColumns results of one row for 64 channels.
template <int kStride>
struct Span {
  static constexpr int kColumns = kStride == 1 ? 8 : 4;
};
constexpr int kSpanWarps = 8;
constexpr int kSpanChannels = 64;

struct SpanPlan {
  std::int64_t chunks = 0;   ///< of 64 channels
  std::uint32_t across = 0;  ///< spans in a row of out
  std::uint32_t spans = 0;   ///< of one chunk
  std::uint32_t blocks = 0;  ///< for one chunk; each takes every blocks-th eight of its spans
};

/// Spans of one chunk; the kernel counts them in 32 bits.
constexpr std::int64_t count_spans(const DepthwiseConvArgs& args, int columns) noexcept {
  return args.batch * args.out_size[0] * ceil_div(args.out_size[1], columns);
}

template <int kStride>
SpanPlan plan_spans(const DepthwiseConvArgs& args, int sm_count) noexcept {
  constexpr std::int64_t kMostBlocks = 65535;  // of the second dimension of a grid
  constexpr std::int64_t kBlocksOfMultiprocessor = 16;
  SpanPlan plan;
  plan.chunks = ceil_div(args.channels, kSpanChannels);
  plan.across = static_cast<std::uint32_t>(ceil_div(args.out_size[1], Span<kStride>::kColumns));
  plan.spans = static_cast<std::uint32_t>(count_spans(args, Span<kStride>::kColumns));
  const std::int64_t wanted = ceil_div(kBlocksOfMultiprocessor * std::max(sm_count, 1),
                                       std::max<std::int64_t>(plan.chunks, 1));
  plan.blocks = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(ceil_div(plan.spans, kSpanWarps), 1, std::min(wanted, kMostBlocks)));
  return plan;
}

}  // namespace xpuruntime::cuda_raw::conv

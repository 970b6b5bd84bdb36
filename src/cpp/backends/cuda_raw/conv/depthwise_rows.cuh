// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda_raw/conv/depthwise_device.cuh"

// The route `rows`: a block reads its part of x once into shared memory, as fp32 and with zeros for
// the padding. Each thread then computes a strip of results: it reads each row of its window in
// pieces of 16 bytes and adds it to all rows of results that see it.
namespace xpuruntime::cuda_raw::conv {

/// What a block keeps of its planes besides x.
template <int kWindow, int kStride>
struct PlaneData {
  alignas(16) float weight[kMaxPlanes][Strip<kWindow, kStride>::kWeightPitch];
  float bias[kMaxPlanes];
  std::int64_t x[kMaxPlanes];    ///< where the plane begins in x
  std::int64_t out[kMaxPlanes];  ///< in out
};

/// Where a block is.
struct TileAt {
  std::int64_t first_plane;
  int planes;                   ///< that there are
  int first_row, first_column;  ///< strips into the plane

  __device__ __forceinline__ TileAt(const DepthwiseConvArgs& args, const TilePlan& plan,
                                    unsigned block) {
    const unsigned tiles_x = static_cast<unsigned>(plan.tiles_x);
    const unsigned tiles_y = static_cast<unsigned>(plan.tiles_y);
    first_column = static_cast<int>(block % tiles_x) * plan.strips_x;
    first_row = static_cast<int>(block / tiles_x % tiles_y) * plan.strips_y;
    first_plane = static_cast<std::int64_t>(block / tiles_x / tiles_y) * plan.planes;
    const std::int64_t left = args.batch * args.channels - first_plane;
    planes = left < plan.planes ? static_cast<int>(left) : plan.planes;
  }
};

template <typename T, int kWindow, int kStride>
__device__ __forceinline__ void load_planes(const DepthwiseConvArgs& args, const TileAt& at,
                                            PlaneData<kWindow, kStride>& data, int thread,
                                            int threads) {
  using S = Strip<kWindow, kStride>;
  for (int plane = thread; plane < at.planes; plane += threads) {
    const std::int64_t image = (at.first_plane + plane) / args.channels;
    const std::int64_t channel = at.first_plane + plane - image * args.channels;
    data.x[plane] = image * args.x_strides[0] + channel * args.x_strides[1];
    data.out[plane] = image * args.out_strides[0] + channel * args.out_strides[1];
    data.bias[plane] = args.bias == nullptr
                           ? 0.0F
                           : widen(static_cast<const T*>(args.bias)[channel * args.bias_stride]);
  }
  for (int item = thread; item < at.planes * S::kWeights; item += threads) {
    const int plane = item / S::kWeights;
    const int tap = item % S::kWeights;
    const std::int64_t channel = (at.first_plane + plane) % args.channels;
    const std::int64_t from = channel * args.weight_strides[0] +
                              tap / kWindow * args.weight_strides[1] +
                              tap % kWindow * args.weight_strides[2];
    data.weight[plane][tap] = widen(static_cast<const T*>(args.weight)[from]);
  }
}

template <typename T, int kWindow, int kStride>
__device__ __forceinline__ void load_tile(const DepthwiseConvArgs& args, const TilePlan& plan,
                                          const TileAt& at, const PlaneData<kWindow, kStride>& data,
                                          float* tile, int thread, int threads) {
  using S = Strip<kWindow, kStride>;
  const int fours = plan.input_pitch / 4;
  const int items = at.planes * plan.input_rows * fours;
  const int top = at.first_row * S::kRows * kStride - args.padding[0];
  const int left = at.first_column * S::kColumns * kStride - args.padding[1];
  const int height = static_cast<int>(args.size[0]);
  const int width = static_cast<int>(args.size[1]);
#pragma unroll 2
  for (int item = thread; item < items; item += threads) {
    const int line = divide(item, plan.by_fours);
    const int plane = divide(line, plan.by_input_rows);
    const int y = top + line - plane * plan.input_rows;
    const int z = left + 4 * (item - line * fours);
    float4 values = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (y >= 0 && y < height) {
      const T* const from =
          static_cast<const T*>(args.x) + data.x[plane] + y * args.x_strides[2] + z;
      if (z >= 0 && z < width) values.x = widen(from[0]);
      if (z >= -1 && z + 1 < width) values.y = widen(from[1]);
      if (z >= -2 && z + 2 < width) values.z = widen(from[2]);
      if (z >= -3 && z + 3 < width) values.w = widen(from[3]);
    }
    reinterpret_cast<float4*>(tile)[item] = values;
  }
}

template <int kWindow, int kStride>
struct StripSums {
  float values[Strip<kWindow, kStride>::kRows][Strip<kWindow, kStride>::kColumns];
};

template <int kWindow, int kStride>
__device__ __forceinline__ void add_up(const float* window, int pitch, const float* weights,
                                       StripSums<kWindow, kStride>& sums) {
  using S = Strip<kWindow, kStride>;
  float weight[S::kWeightPitch];
#pragma unroll
  for (int i = 0; i < S::kWeightPitch; i += 4) {
    const float4 four = reinterpret_cast<const float4*>(weights)[i / 4];
    weight[i] = four.x;
    weight[i + 1] = four.y;
    weight[i + 2] = four.z;
    weight[i + 3] = four.w;
  }
#pragma unroll
  for (int line = 0; line < S::kInputRows; ++line) {
    float x[4 * S::kFours];
#pragma unroll
    for (int i = 0; i < S::kFours; ++i) {
      const float4 four = reinterpret_cast<const float4*>(window + line * pitch)[i];
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int row = 0; row < S::kRows; ++row) {
      const int i = line - row * kStride;
      if (i < 0 || i >= kWindow) continue;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
#pragma unroll
        for (int column = 0; column < S::kColumns; ++column) {
          sums.values[row][column] =
              fmaf(x[column * kStride + j], weight[i * kWindow + j], sums.values[row][column]);
        }
      }
    }
  }
}

template <typename T, int kWindow, int kStride>
__device__ __forceinline__ void store_strip(const DepthwiseConvArgs& args, std::int64_t plane,
                                            int row, int column, float bias, bool in_fours,
                                            const StripSums<kWindow, kStride>& sums) {
  using S = Strip<kWindow, kStride>;
  const int height = static_cast<int>(args.out_size[0]);
  const int width = static_cast<int>(args.out_size[1]);
#pragma unroll
  for (int i = 0; i < S::kRows; ++i) {
    if (row + i >= height) break;
    T* const to = static_cast<T*>(args.out) + plane + (row + i) * args.out_strides[2] + column;
    Pack<T, S::kColumns> pack;
#pragma unroll
    for (int j = 0; j < S::kColumns; ++j) {
      pack.values[j] = narrow<T>(activate(sums.values[i][j] + bias, args.activation));
    }
    if (in_fours) {
      *reinterpret_cast<Pack<T, S::kColumns>*>(to) = pack;
    } else {
#pragma unroll
      for (int j = 0; j < S::kColumns; ++j) {
        if (column + j < width) to[j] = pack.values[j];
      }
    }
  }
}

/// What a thread does once x is in shared memory. `in_fours`: rows of out are whole strips, each of
/// which can be stored at once.
template <int kWindow, int kStride>
__device__ __forceinline__ void compute_strip(const DepthwiseConvArgs& args, const TilePlan& plan,
                                              const TileAt& at,
                                              const PlaneData<kWindow, kStride>& data,
                                              const float* tile, int thread, bool in_fours) {
  using S = Strip<kWindow, kStride>;
  const int plane = divide(thread, plan.by_strips);
  if (plane >= at.planes) return;
  const int strip = thread - plane * plan.strips_x * plan.strips_y;
  const int down = divide(strip, plan.by_strips_x);
  const int across = strip - down * plan.strips_x;
  const int row = (at.first_row + down) * S::kRows;
  const int column = (at.first_column + across) * S::kColumns;
  if (row >= args.out_size[0] || column >= args.out_size[1]) return;
  StripSums<kWindow, kStride> sums{};
  add_up<kWindow, kStride>(
      tile + (plane * plan.input_rows + down * S::kRows * kStride) * plan.input_pitch +
          across * S::kColumns * kStride,
      plan.input_pitch, data.weight[plane], sums);
  with_type(args.type, [&](auto* model) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(model)>>;
    store_strip<T, kWindow, kStride>(args, data.out[plane], row, column, data.bias[plane], in_fours,
                                     sums);
  });
}

template <int kWindow, int kStride>
__global__ void __launch_bounds__(kTileThreads)
    depthwise_rows(__grid_constant__ const DepthwiseConvArgs args,
                   __grid_constant__ const TilePlan plan, bool in_fours) {
  __shared__ PlaneData<kWindow, kStride> data;
  extern __shared__ float4 shared[];
  float* const tile = reinterpret_cast<float*>(shared);
  const TileAt at(args, plan, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  with_type(args.type, [&](auto* model) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(model)>>;
    load_planes<T, kWindow, kStride>(args, at, data, thread, threads);
    __syncthreads();
    load_tile<T, kWindow, kStride>(args, plan, at, data, tile, thread, threads);
  });
  __syncthreads();
  compute_strip<kWindow, kStride>(args, plan, at, data, tile, thread, in_fours);
}

}  // namespace xpuruntime::cuda_raw::conv

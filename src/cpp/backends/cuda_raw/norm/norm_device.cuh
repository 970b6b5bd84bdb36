// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_raw/element.cuh"

namespace xpuruntime::cuda_raw::norm {

constexpr int kAccessBytes = 16;
constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

/// The adjacent elements that one access moves. Two-byte elements are kept in pairs, as registers
/// hold them.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  static constexpr bool kPairs = sizeof(T) == 2 && kWidth % 2 == 0;
  using Word = std::conditional_t<kPairs, std::uint32_t, T>;
  Word words[kPairs ? kWidth / 2 : kWidth];
};

template <typename T, int kWidth>
__device__ __forceinline__ const Pack<T, kWidth>* row_of(const void* tensor, std::int64_t row,
                                                         std::int64_t stride) {
  return reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(tensor) + row * stride);
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth>* row_of(void* tensor, std::int64_t row,
                                                   std::int64_t stride) {
  return reinterpret_cast<Pack<T, kWidth>*>(static_cast<T*>(tensor) + row * stride);
}

/// Read or written once: leaves the caches to what is used again.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_once(const Pack<T, kWidth>* from) {
  if constexpr (sizeof(T) * kWidth == kAccessBytes) {
    return __builtin_bit_cast(Pack<T, kWidth>, __ldcs(reinterpret_cast<const uint4*>(from)));
  } else {
    return *from;
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_once(Pack<T, kWidth>* to, const Pack<T, kWidth>& pack) {
  if constexpr (sizeof(T) * kWidth == kAccessBytes) {
    __stcs(reinterpret_cast<uint4*>(to), __builtin_bit_cast(uint4, pack));
  } else {
    *to = pack;
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void unpack(const Pack<T, kWidth>& pack, float (&values)[kWidth]) {
  if constexpr (!Pack<T, kWidth>::kPairs) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = widen(pack.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const std::uint32_t word = pack.words[i / 2];
      if constexpr (std::is_same_v<T, __half>) {
        __half2 halves;
        memcpy(&halves, &word, sizeof(word));
        const float2 pair = __half22float2(halves);
        values[i] = pair.x;
        values[i + 1] = pair.y;
      } else {  // bf16 is the upper half of fp32
        values[i] = __uint_as_float(word << 16);
        values[i + 1] = __uint_as_float(word & 0xffff0000U);
      }
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> pack_up(const float (&values)[kWidth]) {
  Pack<T, kWidth> pack;
  if constexpr (!Pack<T, kWidth>::kPairs) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.words[i] = narrow<T>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
        memcpy(&pack.words[i / 2], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
        memcpy(&pack.words[i / 2], &pair, sizeof(pair));
      }
    }
  }
  return pack;
}

/// Makes the compiler unpack again after this point instead of keeping the fp32 values of an
/// earlier unpack in twice the registers.
template <typename T, int kWidth>
__device__ __forceinline__ void keep_packed(Pack<T, kWidth>& pack) {
  if constexpr (Pack<T, kWidth>::kPairs) {
#pragma unroll
    for (auto& word : pack.words) asm volatile("" : "+r"(word));
  }
}

/// Pack number `index` of a weight or bias, of type T or fp32; `missing` where there is none.
template <typename T, int kWidth>
__device__ __forceinline__ void load_weight(const void* from, bool is_fp32, float missing,
                                            int index, float (&values)[kWidth]) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = missing;
  } else if (is_fp32) {
    const float* at = static_cast<const float*>(from) + static_cast<std::int64_t>(index) * kWidth;
    if constexpr (kWidth % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(at + i));
        values[i] = four.x;
        values[i + 1] = four.y;
        values[i + 2] = four.z;
        values[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = __ldg(at + i);
    }
  } else if constexpr (sizeof(T) * kWidth == kAccessBytes) {
    const uint4 four = __ldg(static_cast<const uint4*>(from) + index);
    unpack(__builtin_bit_cast(Pack<T, kWidth>, four), values);
  } else {
    unpack(static_cast<const Pack<T, kWidth>*>(from)[index], values);
  }
}

/// The sum over 2^k lanes, in every one of them. `lanes` is a power of two.
__device__ __forceinline__ float sum_lanes(float value, int lanes) {
  for (int offset = lanes >> 1; offset > 0; offset >>= 1) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  return value;
}

__device__ __forceinline__ float sum_warp(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset >>= 1) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  return value;
}

/// Threads of one block that share a row: whole warps, `threads` of them, side by side in x. Where
/// a block has several rows, distinguished by threadIdx.y, each has one warp.
struct RowTeam {
  int threads;
  int warps;
  int lanes;  ///< The smallest power of two that is not below `warps`.
  int warp;
  int lane;

  __device__ __forceinline__ RowTeam() {
    threads = static_cast<int>(blockDim.x);
    warps = threads / kWarp;
    lanes = warps > 1 ? 1 << (kWarp - __clz(warps - 1)) : 1;
    warp = static_cast<int>(threadIdx.x) / kWarp;
    lane = static_cast<int>(threadIdx.x) % kWarp;
  }
};

/// Mean of a row and the sum of squared distances from it.
struct Moments {
  float mean;
  float squares;
};

/// Joins what the warps of a team found; `scratch` has one place a warp. `count` is the number of
/// elements that warp number lane % lanes holds where there is such a warp, `columns` of the row.
/// `about_zero`: the squares are those of the elements themselves, and the mean is not wanted.
__device__ __forceinline__ Moments join_warps(const RowTeam& team, Moments own, float count,
                                              float columns, bool about_zero, float2* scratch) {
  if (team.lane == 0) scratch[team.warp] = make_float2(own.mean, own.squares);
  __syncthreads();
  const int other = team.lane & (team.lanes - 1);
  const float2 found = other < team.warps ? scratch[other] : make_float2(0.0F, 0.0F);
  // Lanes without a warp hold nothing, whatever the caller counts for them.
  if (other >= team.warps) count = 0.0F;
  Moments all{};
  if (about_zero) {
    all.squares = sum_lanes(found.y, team.lanes);
    return all;
  }
  const float pivot = scratch[0].x;
  all.mean = pivot + sum_lanes(count * (found.x - pivot), team.lanes) / columns;
  const float apart = found.x - all.mean;
  all.squares = sum_lanes(found.y + count * apart * apart, team.lanes);
  return all;
}

}  // namespace xpuruntime::cuda_raw::norm

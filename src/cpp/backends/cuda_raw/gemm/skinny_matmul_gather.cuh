// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "cuda_raw/gemm/skinny_matmul_tile.cuh"

// Skinny matmul for any alignment and any compute capability from 8.0 on: all threads load aligned
// 16-byte granules into registers one chunk ahead, shift them to the row's own alignment and store
// them to shared memory, from where the chunk is multiplied.
namespace xpuruntime::cuda_raw::skinny {

/// Elements (2 bytes each) of `low` and `high`, taken as 16 adjacent ones, from number `shift`
/// (0 ... 7) on.
__device__ __forceinline__ uint4 shift_elements(uint4 low, uint4 high, int shift) {
  const bool by4 = (shift & 4) != 0;
  const bool by2 = (shift & 2) != 0;
  const std::uint32_t select = (shift & 1) != 0 ? 0x5432 : 0x3210;
  const std::uint32_t u0 = by4 ? low.z : low.x;
  const std::uint32_t u1 = by4 ? low.w : low.y;
  const std::uint32_t u2 = by4 ? high.x : low.z;
  const std::uint32_t u3 = by4 ? high.y : low.w;
  const std::uint32_t u4 = by4 ? high.z : high.x;
  const std::uint32_t u5 = by4 ? high.w : high.y;
  const std::uint32_t v0 = by2 ? u1 : u0;
  const std::uint32_t v1 = by2 ? u2 : u1;
  const std::uint32_t v2 = by2 ? u3 : u2;
  const std::uint32_t v3 = by2 ? u4 : u3;
  const std::uint32_t v4 = by2 ? u5 : u4;
  return make_uint4(__byte_perm(v0, v1, select), __byte_perm(v1, v2, select),
                    __byte_perm(v2, v3, select), __byte_perm(v3, v4, select));
}

/// Zeros from element `count` on.
__device__ __forceinline__ uint4 keep_elements(uint4 v, int count) {
  const auto keep = [&](std::uint32_t word, int i) {
    return count >= 2 * i + 2 ? word : count == 2 * i + 1 ? word & 0xffffu : 0u;
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 1), keep(v.z, 2), keep(v.w, 3));
}

// Not inlined: it is for the first and the last granule of an operand.
inline __device__ __noinline__ uint4 load_granule_partly(std::uintptr_t address,
                                                         std::uintptr_t first,
                                                         std::uintptr_t last) {
  std::uint32_t elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uintptr_t element = address + 2 * i;
    elements[i] = 0;
    if (element >= first && element + 2 <= last) {
      elements[i] = *reinterpret_cast<const std::uint16_t*>(element);
    }
  }
  return make_uint4(elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                    elements[4] | elements[5] << 16, elements[6] | elements[7] << 16);
}

/// The granule at `address`, a multiple of 16. What of it lies outside [first, last) is not read
/// and zero. Not through the non-coherent path: work that was still running when this kernel
/// started may have written it.
__device__ __forceinline__ uint4 load_granule(std::uintptr_t address, std::uintptr_t first,
                                              std::uintptr_t last) {
  if (address < first || address + 16 > last) return load_granule_partly(address, first, last);
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

/// kRowsOf rows of kLength elements on their way from device to shared memory. The lanes of a warp
/// take one row, or several short ones, a step; one more granule a row is loaded where the row does
/// not start on 16 bytes, those of all rows of a warp together.
template <int kRowsOf, int kLength, int kWarps>
class Gather {
  static constexpr int kGranules = kLength / 8;
  static constexpr int kRowsAtOnce = 32 / kGranules;
  static constexpr int kSteps = (kRowsOf + kRowsAtOnce * kWarps - 1) / (kRowsAtOnce * kWarps);
  static_assert(kLength % 8 == 0 && 32 % kGranules == 0 && kSteps * kRowsAtOnce <= 32);

 public:
  /// The rows start `stride` bytes apart from `source` on; `rows` of them and `length` elements of
  /// each are read, the others become zeros. [first, last) is the whole operand.
  __device__ __forceinline__ void load(std::uintptr_t source, std::int64_t stride, int rows,
                                       int length, std::uintptr_t first, std::uintptr_t last) {
    source_ = source;
    stride_ = stride;
    rows_ = rows;
    length_ = length;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = row_of(step * kRowsAtOnce + lane / kGranules);
      own_[step] = load_one(row, lane % kGranules, first, last);
    }
    extra_ = make_uint4(0, 0, 0, 0);
    if (lane < kSteps * kRowsAtOnce) extra_ = load_one(row_of(lane), kGranules, first, last);
  }

  /// Writes the rows as panels from `tile` on. Called by whole warps.
  __device__ __forceinline__ void store(std::uint32_t tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int granule = lane % kGranules;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int index = step * kRowsAtOnce + lane / kGranules;
      const int row = row_of(index);
      const uint4 next = shuffle(own_[step], granule + 1 < kGranules ? lane + 1 : lane);
      const uint4 extra = shuffle(extra_, index);
      const uint4 high = granule + 1 < kGranules ? next : extra;
      const int shift = static_cast<int>((source_ + row * stride_) % 16 / 2);
      const uint4 value =
          keep_elements(shift_elements(own_[step], high, shift), length_ - 8 * granule);
      if (row < kRowsOf) {
        store_shared(unit_address(tile, kRowsOf, row, granule),
                     row < rows_ ? value : make_uint4(0, 0, 0, 0));
      }
    }
  }

 private:
  // The row that is number `index` of those this warp takes.
  static __device__ __forceinline__ int row_of(int index) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return (index / kRowsAtOnce * kWarps + warp) * kRowsAtOnce + index % kRowsAtOnce;
  }
  static __device__ __forceinline__ uint4 shuffle(uint4 v, int lane) {
    return make_uint4(__shfl_sync(0xffffffffu, v.x, lane), __shfl_sync(0xffffffffu, v.y, lane),
                      __shfl_sync(0xffffffffu, v.z, lane), __shfl_sync(0xffffffffu, v.w, lane));
  }
  __device__ __forceinline__ uint4 load_one(int row, int granule, std::uintptr_t first,
                                            std::uintptr_t last) const {
    const std::uintptr_t start = source_ + row * stride_;
    const std::uintptr_t address = start / 16 * 16 + 16 * granule;
    if (row >= rows_ || address >= start + 2 * length_) return make_uint4(0, 0, 0, 0);
    return load_granule(address, first, last);
  }

  uint4 own_[kSteps];
  uint4 extra_;
  std::uintptr_t source_;
  std::int64_t stride_;
  int rows_;
  int length_;
};

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, kGatherBlocksOfSm<S>)
    multiply_gathered(const Problem p) {
  extern __shared__ __align__(1024) unsigned char memory[];
#if __CUDA_ARCH__ >= 900
  const int rank = p.split == 1 ? 0 : cluster_rank();
  if (p.split > 1) cluster_arrive();
  wait_for_earlier_kernels();
#else
  const int rank = 0;
#endif
  const std::int64_t tile = blockIdx.x / static_cast<unsigned>(p.split);
  const int first_column = static_cast<int>(tile * S::kColumns);
  const int columns = min(S::kColumns, p.n - first_column);
  const std::uintptr_t a =
      reinterpret_cast<std::uintptr_t>(static_cast<const T*>(p.a) + blockIdx.y * p.a_batch);
  const std::uintptr_t b =
      reinterpret_cast<std::uintptr_t>(static_cast<const T*>(p.b) + blockIdx.y * p.b_batch);
  const std::uintptr_t a_end = a + 2 * ((p.m - 1) * p.lda + p.k);
  const std::uintptr_t b_end =
      b + 2 * (S::kTransposed ? (p.n - 1) * p.ldb + p.k : (p.k - 1) * p.ldb + p.n);
  int begin, end;
  part_of_k<S>(p, rank, begin, end);
  const int chunks = (end - begin + S::kChunk - 1) / S::kChunk;

  float4* receive = reinterpret_cast<float4*>(memory);
  unsigned char* ring = memory + p.ring_offset;
  Gather<S::kRows, S::kRowLength, S::kWarps> next_b;
  Gather<S::kMaxM, S::kChunk, S::kWarps> next_a;
  const auto load = [&](int chunk) {
    const int start = begin + chunk * S::kChunk;
    const int length = min(S::kChunk, end - start);
    const std::int64_t offset =
        S::kTransposed ? first_column * p.ldb + start : start * p.ldb + first_column;
    next_b.load(b + 2 * offset, 2 * p.ldb, S::kTransposed ? columns : length,
                S::kTransposed ? length : columns, b, b_end);
    next_a.load(a + 2 * static_cast<std::int64_t>(start), 2 * p.lda, p.m, length, a, a_end);
  };

  Accumulator<S> acc = {};
  if (chunks > 0) load(0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const std::uint32_t place = shared_address(ring) + chunk % 2 * S::kStageBytes;
    next_b.store(place);
    next_a.store(place + S::kBytesB);
    if (chunk + 1 < chunks) load(chunk + 1);
    __syncthreads();
    multiply_chunk<T, S>(acc, place, place + S::kBytesB, end - begin - chunk * S::kChunk, S::kMaxM);
  }
  __syncthreads();
  reduce_and_write<T, S>(p, acc, reinterpret_cast<float4*>(ring), receive, first_column, rank);
}

}  // namespace xpuruntime::cuda_raw::skinny

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "wgmma.cuh"

// Further forms of the instructions of wgmma.cuh: those that overwrite their accumulators, which
// the compiler then need not keep before, and those that read both matrices transposed.
namespace xpuruntime::cuda_raw {

#define XPU_NAMES_32                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XPU_NAMES_64                                                                             \
  XPU_NAMES_32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define XPU_EIGHT(kind, i)                                                                    \
  kind(c[i]), kind(c[i + 1]), kind(c[i + 2]), kind(c[i + 3]), kind(c[i + 4]), kind(c[i + 5]), \
      kind(c[i + 6]), kind(c[i + 7])
#define XPU_32(kind, i) \
  XPU_EIGHT(kind, i), XPU_EIGHT(kind, i + 8), XPU_EIGHT(kind, i + 16), XPU_EIGHT(kind, i + 24)
#define XPU_WRITTEN(item) "=f"(item)
#define XPU_CHANGED(item) "+f"(item)
// `setting` compares to give the predicate that keeps the accumulators.
#define XPU_WGMMA(shape, types, names, setting, transposed, a, b, ...)                       \
  asm volatile("{\n.reg .pred keep;\nsetp." setting                                          \
               ".b32 keep, 0, 0;\n"                                                          \
               "wgmma.mma_async.sync.aligned." shape ".f32." types " {" names "}, " a ", " b \
               ", keep, 1, 1, " transposed ";\n}\n"                                          \
               : __VA_ARGS__                                                                 \
               : "l"(left), "l"(right)                                                       \
               : "memory")

/// c = left right^T, left 64 x 16 and right N x 16, N = 2 * kCount, both in shared memory.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_shared_first(float (&c)[kCount], std::uint64_t left,
                                                   std::uint64_t right) {
  static_assert(kCount == 32 || kCount == 64);
  if constexpr (kCount == 32 && kBfloat16) {
    XPU_WGMMA("m64n64k16", "bf16.bf16", XPU_NAMES_32, "ne", "0, 0", "%32", "%33",
              XPU_32(XPU_WRITTEN, 0));
  } else if constexpr (kCount == 32) {
    XPU_WGMMA("m64n64k16", "f16.f16", XPU_NAMES_32, "ne", "0, 0", "%32", "%33",
              XPU_32(XPU_WRITTEN, 0));
  } else if constexpr (kBfloat16) {
    XPU_WGMMA("m64n128k16", "bf16.bf16", XPU_NAMES_64, "ne", "0, 0", "%64", "%65",
              XPU_32(XPU_WRITTEN, 0), XPU_32(XPU_WRITTEN, 32));
  } else {
    XPU_WGMMA("m64n128k16", "f16.f16", XPU_NAMES_64, "ne", "0, 0", "%64", "%65",
              XPU_32(XPU_WRITTEN, 0), XPU_32(XPU_WRITTEN, 32));
  }
}

/// c = left^T right, or c += it where kKeep; left and right 16 x 64, both in shared memory.
template <bool kBfloat16, bool kKeep>
__device__ __forceinline__ void wgmma_both_transposed(float (&c)[32], std::uint64_t left,
                                                      std::uint64_t right) {
  if constexpr (kKeep && kBfloat16) {
    XPU_WGMMA("m64n64k16", "bf16.bf16", XPU_NAMES_32, "eq", "1, 1", "%32", "%33",
              XPU_32(XPU_CHANGED, 0));
  } else if constexpr (kKeep) {
    XPU_WGMMA("m64n64k16", "f16.f16", XPU_NAMES_32, "eq", "1, 1", "%32", "%33",
              XPU_32(XPU_CHANGED, 0));
  } else if constexpr (kBfloat16) {
    XPU_WGMMA("m64n64k16", "bf16.bf16", XPU_NAMES_32, "ne", "1, 1", "%32", "%33",
              XPU_32(XPU_WRITTEN, 0));
  } else {
    XPU_WGMMA("m64n64k16", "f16.f16", XPU_NAMES_32, "ne", "1, 1", "%32", "%33",
              XPU_32(XPU_WRITTEN, 0));
  }
}

#undef XPU_WGMMA
#undef XPU_CHANGED
#undef XPU_WRITTEN
#undef XPU_32
#undef XPU_EIGHT
#undef XPU_NAMES_64
#undef XPU_NAMES_32

}  // namespace xpuruntime::cuda_raw

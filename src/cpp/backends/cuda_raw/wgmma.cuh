// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

// The tensor core instructions of sm_90a, which a warpgroup (four warps) issues together and which
// run while it goes on. Accumulators are 64 x N in fp32: warp w of the group holds rows 16 w to
// 16 w + 15 in the layout that mma.cuh describes, N / 2 numbers a thread.
//
// From wgmma_fence to the wgmma_wait that covers them the registers of an instruction must not be
// touched; `hold` after the wait keeps the compiler from moving their uses before it.
namespace xpuruntime::cuda_raw {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

/// Waits until at most kPending committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

template <int kCount>
__device__ __forceinline__ void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// A matrix of 16-bit elements in shared memory whose 128-byte rows are swizzled as the bulk copy
/// engine does it (eight rows make 1024 bytes, which the start is a multiple of). `panel_bytes` is
/// the distance from one 64-element panel to the next; it counts only for matrices that are read
/// transposed.
__device__ __forceinline__ std::uint64_t wgmma_matrix(std::uint32_t address,
                                                      std::uint32_t panel_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (std::uint64_t{panel_bytes >> 4} << 16) |
         ((address & 0x3ffff) >> 4);
}

// The accumulators of an instruction: how PTX numbers them, and the registers that they are.
#define XPU_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XPU_NAMES_40 \
  XPU_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define XPU_NAMES_48 \
  XPU_NAMES_40       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define XPU_NAMES_56 \
  XPU_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define XPU_NAMES_64 \
  XPU_NAMES_56       \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define XPU_NAMES_88                                                                 \
  XPU_NAMES_64                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87"
#define XPU_NAMES_96 \
  XPU_NAMES_88       \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define XPU_NAMES_128                                                                            \
  XPU_NAMES_96                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

#define XPU_CHANGED(item) "+f"(item)
#define XPU_WRITTEN(item) "=f"(item)
#define XPU_EIGHT(access, i)                                                            \
  access(c[i]), access(c[i + 1]), access(c[i + 2]), access(c[i + 3]), access(c[i + 4]), \
      access(c[i + 5]), access(c[i + 6]), access(c[i + 7])
#define XPU_REGISTERS_32(access) \
  XPU_EIGHT(access, 0), XPU_EIGHT(access, 8), XPU_EIGHT(access, 16), XPU_EIGHT(access, 24)
#define XPU_REGISTERS_40(access) XPU_REGISTERS_32(access), XPU_EIGHT(access, 32)
#define XPU_REGISTERS_48(access) XPU_REGISTERS_40(access), XPU_EIGHT(access, 40)
#define XPU_REGISTERS_56(access) XPU_REGISTERS_48(access), XPU_EIGHT(access, 48)
#define XPU_REGISTERS_64(access) XPU_REGISTERS_56(access), XPU_EIGHT(access, 56)
#define XPU_REGISTERS_88(access) \
  XPU_REGISTERS_64(access), XPU_EIGHT(access, 64), XPU_EIGHT(access, 72), XPU_EIGHT(access, 80)
#define XPU_REGISTERS_96(access) XPU_REGISTERS_88(access), XPU_EIGHT(access, 88)
#define XPU_REGISTERS_128(access)                                                                  \
  XPU_REGISTERS_96(access), XPU_EIGHT(access, 96), XPU_EIGHT(access, 104), XPU_EIGHT(access, 112), \
      XPU_EIGHT(access, 120)

// Every width declared here: the accumulators of a thread, N, and the numbers of the five operands
// that can follow the accumulators.
// clang-format off
#define XPU_WIDTHS(instruction)                  \
  instruction(32, 64, 32, 33, 34, 35, 36)        \
  instruction(40, 80, 40, 41, 42, 43, 44)        \
  instruction(48, 96, 48, 49, 50, 51, 52)        \
  instruction(56, 112, 56, 57, 58, 59, 60)       \
  instruction(64, 128, 64, 65, 66, 67, 68)       \
  instruction(88, 176, 88, 89, 90, 91, 92)       \
  instruction(96, 192, 96, 97, 98, 99, 100)      \
  instruction(128, 256, 128, 129, 130, 131, 132)
// clang-format on
#define XPU_IS_RIGHT(count, columns, n0, n1, n2, n3, n4)                               \
  static_assert(columns == 2 * count && n0 == count && n1 == n0 + 1 && n2 == n1 + 1 && \
                n3 == n2 + 1 && n4 == n3 + 1);
XPU_WIDTHS(XPU_IS_RIGHT)

// One instruction. `setting` compares to give the predicate that keeps what the accumulators hold,
// `operands` names what follows them, and `inputs` lists it in parentheses.
#define XPU_LIST(...) __VA_ARGS__
#define XPU_WGMMA(count, columns, types, setting, operands, access, inputs)  \
  asm volatile("{\n.reg .pred keep;\nsetp." setting                          \
               ";\n"                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types \
               " {" XPU_NAMES_##count "}, " operands ";\n}\n"                \
               : XPU_REGISTERS_##count(access)                               \
               : XPU_LIST inputs                                             \
               : "memory")

// That instruction of either type, where kCount is `count`.
#define XPU_WHERE(count, columns, setting, operands, access, inputs)             \
  if constexpr (kCount == count) {                                               \
    if constexpr (kBfloat16) {                                                   \
      XPU_WGMMA(count, columns, "bf16.bf16", setting, operands, access, inputs); \
    } else {                                                                     \
      XPU_WGMMA(count, columns, "f16.f16", setting, operands, access, inputs);   \
    }                                                                            \
  }
#define XPU_SHARED(count, columns, n0, n1, n2, n3, n4)                                          \
  XPU_WHERE(count, columns, "ne.b32 keep, %" #n2 ", 0", "%" #n0 ", %" #n1 ", keep, 1, 1, 0, 0", \
            XPU_CHANGED, ("l"(a), "l"(b), "r"(keep)))
#define XPU_SHARED_FIRST(count, columns, n0, n1, n2, n3, n4)                             \
  XPU_WHERE(count, columns, "ne.b32 keep, 0, 0", "%" #n0 ", %" #n1 ", keep, 1, 1, 0, 0", \
            XPU_WRITTEN, ("l"(a), "l"(b)))
#define XPU_TRANSPOSED(count, columns, n0, n1, n2, n3, n4)                                    \
  XPU_WHERE(count, columns, "eq.b32 keep, 0, 0",                                              \
            "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", keep, 1, 1, 1", XPU_CHANGED, \
            ("r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)))
#define XPU_BOTH_TRANSPOSED(count, columns, n0, n1, n2, n3, n4)                            \
  if constexpr (kKeep) {                                                                   \
    XPU_WHERE(count, columns, "eq.b32 keep, 0, 0", "%" #n0 ", %" #n1 ", keep, 1, 1, 1, 1", \
              XPU_CHANGED, ("l"(a), "l"(b)))                                               \
  } else {                                                                                 \
    XPU_WHERE(count, columns, "ne.b32 keep, 0, 0", "%" #n0 ", %" #n1 ", keep, 1, 1, 1, 1", \
              XPU_WRITTEN, ("l"(a), "l"(b)))                                               \
  }
#define XPU_IS(count, ...) || kCount == count

/// Whether there are instructions with `kCount` accumulators a thread, N / 2.
template <int kCount>
inline constexpr bool kWgmmaWidth = false XPU_WIDTHS(XPU_IS);

/// c = a b^T + (keep ? c : 0) for a of 64 x 16 and b of N x 16, both in shared memory.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_shared(float (&c)[kCount], std::uint64_t a, std::uint64_t b,
                                             int keep) {
  static_assert(kWgmmaWidth<kCount>, "no instruction of this width is declared here");
  XPU_WIDTHS(XPU_SHARED)
}

/// The same without what c held, which the compiler then need not keep before: c = a b^T.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_shared_first(float (&c)[kCount], std::uint64_t a,
                                                   std::uint64_t b) {
  static_assert(kWgmmaWidth<kCount>, "no instruction of this width is declared here");
  XPU_WIDTHS(XPU_SHARED_FIRST)
}

/// c += a b for a of 64 x 16 in registers (the fragment of mma.cuh) and b of 16 x N in shared
/// memory.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_transposed(float (&c)[kCount], const std::uint32_t (&a)[4],
                                                 std::uint64_t b) {
  static_assert(kWgmmaWidth<kCount>, "no instruction of this width is declared here");
  XPU_WIDTHS(XPU_TRANSPOSED)
}

/// c = a^T b, or c += it where kKeep, for a of 16 x 64 and b of 16 x N, both in shared memory.
template <bool kBfloat16, bool kKeep, int kCount>
__device__ __forceinline__ void wgmma_both_transposed(float (&c)[kCount], std::uint64_t a,
                                                      std::uint64_t b) {
  static_assert(kWgmmaWidth<kCount>, "no instruction of this width is declared here");
  XPU_WIDTHS(XPU_BOTH_TRANSPOSED)
}

#undef XPU_IS
#undef XPU_BOTH_TRANSPOSED
#undef XPU_TRANSPOSED
#undef XPU_SHARED_FIRST
#undef XPU_SHARED
#undef XPU_WHERE
#undef XPU_WGMMA
#undef XPU_LIST
#undef XPU_IS_RIGHT
#undef XPU_WIDTHS
#undef XPU_REGISTERS_128
#undef XPU_REGISTERS_96
#undef XPU_REGISTERS_88
#undef XPU_REGISTERS_64
#undef XPU_REGISTERS_56
#undef XPU_REGISTERS_48
#undef XPU_REGISTERS_40
#undef XPU_REGISTERS_32
#undef XPU_EIGHT
#undef XPU_WRITTEN
#undef XPU_CHANGED
#undef XPU_NAMES_128
#undef XPU_NAMES_96
#undef XPU_NAMES_88
#undef XPU_NAMES_64
#undef XPU_NAMES_56
#undef XPU_NAMES_48
#undef XPU_NAMES_40
#undef XPU_NAMES_32

}  // namespace xpuruntime::cuda_raw

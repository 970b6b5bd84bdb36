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
__device__ __forceinline__ void hold(float (&registers)[kCount]) {
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

#define XPU_WGMMA_64_NAMES                                                      \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"   \
  "}"
#define XPU_WGMMA_64_REGISTERS                                                                    \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define XPU_WGMMA_64_SHARED(types)                                               \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " XPU_WGMMA_64_NAMES \
      ", %32, %33, keep, 1, 1, 0, 0;\n}\n"                                       \
      : XPU_WGMMA_64_REGISTERS                                                   \
      : "l"(a), "l"(b), "r"(keep)                                                \
      : "memory")
#define XPU_WGMMA_64_TRANSPOSED(types)                                           \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " XPU_WGMMA_64_NAMES \
      ", {%32, %33, %34, %35}, %36, keep, 1, 1, 1;\n}\n"                         \
      : XPU_WGMMA_64_REGISTERS                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
      : "memory")

#define XPU_WGMMA_80_NAMES                                                      \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"                                      \
  "}"
#define XPU_WGMMA_80_REGISTERS                                                                    \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39])
#define XPU_WGMMA_80_SHARED(types)                                               \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %42, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." types " " XPU_WGMMA_80_NAMES \
      ", %40, %41, keep, 1, 1, 0, 0;\n}\n"                                       \
      : XPU_WGMMA_80_REGISTERS                                                   \
      : "l"(a), "l"(b), "r"(keep)                                                \
      : "memory")
#define XPU_WGMMA_80_TRANSPOSED(types)                                           \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." types " " XPU_WGMMA_80_NAMES \
      ", {%40, %41, %42, %43}, %44, keep, 1, 1, 1;\n}\n"                         \
      : XPU_WGMMA_80_REGISTERS                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
      : "memory")

#define XPU_WGMMA_96_NAMES                                                         \
  "{"                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "    \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "    \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  "}"
#define XPU_WGMMA_96_REGISTERS                                                                    \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
#define XPU_WGMMA_96_SHARED(types)                                               \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %50, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." types " " XPU_WGMMA_96_NAMES \
      ", %48, %49, keep, 1, 1, 0, 0;\n}\n"                                       \
      : XPU_WGMMA_96_REGISTERS                                                   \
      : "l"(a), "l"(b), "r"(keep)                                                \
      : "memory")
#define XPU_WGMMA_96_TRANSPOSED(types)                                           \
  asm volatile(                                                                  \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." types " " XPU_WGMMA_96_NAMES \
      ", {%48, %49, %50, %51}, %52, keep, 1, 1, 1;\n}\n"                         \
      : XPU_WGMMA_96_REGISTERS                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                       \
      : "memory")

#define XPU_WGMMA_112_NAMES                                                     \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55"                                 \
  "}"
#define XPU_WGMMA_112_REGISTERS                                                                   \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),  \
      "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55])
#define XPU_WGMMA_112_SHARED(types)                                                \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %58, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n112k16.f32." types " " XPU_WGMMA_112_NAMES \
      ", %56, %57, keep, 1, 1, 0, 0;\n}\n"                                         \
      : XPU_WGMMA_112_REGISTERS                                                    \
      : "l"(a), "l"(b), "r"(keep)                                                  \
      : "memory")
#define XPU_WGMMA_112_TRANSPOSED(types)                                            \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n112k16.f32." types " " XPU_WGMMA_112_NAMES \
      ", {%56, %57, %58, %59}, %60, keep, 1, 1, 1;\n}\n"                           \
      : XPU_WGMMA_112_REGISTERS                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                         \
      : "memory")

#define XPU_WGMMA_128_NAMES                                                     \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"                                                                    \
  "}"
#define XPU_WGMMA_128_REGISTERS                                                                   \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),  \
      "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),  \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define XPU_WGMMA_128_SHARED(types)                                                \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " XPU_WGMMA_128_NAMES \
      ", %64, %65, keep, 1, 1, 0, 0;\n}\n"                                         \
      : XPU_WGMMA_128_REGISTERS                                                    \
      : "l"(a), "l"(b), "r"(keep)                                                  \
      : "memory")
#define XPU_WGMMA_128_TRANSPOSED(types)                                            \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " XPU_WGMMA_128_NAMES \
      ", {%64, %65, %66, %67}, %68, keep, 1, 1, 1;\n}\n"                           \
      : XPU_WGMMA_128_REGISTERS                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                         \
      : "memory")

#define XPU_WGMMA_176_NAMES                                                     \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, " \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"                       \
  "}"
#define XPU_WGMMA_176_REGISTERS                                                                   \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),  \
      "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),  \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]),  \
      "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]),  \
      "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]),  \
      "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]),  \
      "+f"(c[85]), "+f"(c[86]), "+f"(c[87])
#define XPU_WGMMA_176_SHARED(types)                                                \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %90, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n176k16.f32." types " " XPU_WGMMA_176_NAMES \
      ", %88, %89, keep, 1, 1, 0, 0;\n}\n"                                         \
      : XPU_WGMMA_176_REGISTERS                                                    \
      : "l"(a), "l"(b), "r"(keep)                                                  \
      : "memory")
#define XPU_WGMMA_176_TRANSPOSED(types)                                            \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n176k16.f32." types " " XPU_WGMMA_176_NAMES \
      ", {%88, %89, %90, %91}, %92, keep, 1, 1, 1;\n}\n"                           \
      : XPU_WGMMA_176_REGISTERS                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                         \
      : "memory")

#define XPU_WGMMA_192_NAMES                                                     \
  "{"                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, " \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
  "%92, %93, %94, %95"                                                          \
  "}"
#define XPU_WGMMA_192_REGISTERS                                                                   \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),  \
      "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),  \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]),  \
      "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]),  \
      "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]),  \
      "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]),  \
      "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91]),  \
      "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])
#define XPU_WGMMA_192_SHARED(types)                                                \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %98, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." types " " XPU_WGMMA_192_NAMES \
      ", %96, %97, keep, 1, 1, 0, 0;\n}\n"                                         \
      : XPU_WGMMA_192_REGISTERS                                                    \
      : "l"(a), "l"(b), "r"(keep)                                                  \
      : "memory")
#define XPU_WGMMA_192_TRANSPOSED(types)                                            \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." types " " XPU_WGMMA_192_NAMES \
      ", {%96, %97, %98, %99}, %100, keep, 1, 1, 1;\n}\n"                          \
      : XPU_WGMMA_192_REGISTERS                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                         \
      : "memory")

#define XPU_WGMMA_256_NAMES                                                        \
  "{"                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "    \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "    \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "    \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "    \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "    \
  "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "    \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "   \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127"                           \
  "}"
#define XPU_WGMMA_256_REGISTERS                                                                   \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),    \
      "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),  \
      "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),  \
      "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),  \
      "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),  \
      "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),  \
      "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),  \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]),  \
      "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]),  \
      "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]),  \
      "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]),  \
      "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91]),  \
      "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]), "+f"(c[97]), "+f"(c[98]),  \
      "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), "+f"(c[104]),          \
      "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]),         \
      "+f"(c[111]), "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]),         \
      "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), "+f"(c[121]), "+f"(c[122]),         \
      "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
#define XPU_WGMMA_256_SHARED(types)                                                \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %130, 0;\n"                          \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types " " XPU_WGMMA_256_NAMES \
      ", %128, %129, keep, 1, 1, 0, 0;\n}\n"                                       \
      : XPU_WGMMA_256_REGISTERS                                                    \
      : "l"(a), "l"(b), "r"(keep)                                                  \
      : "memory")
#define XPU_WGMMA_256_TRANSPOSED(types)                                            \
  asm volatile(                                                                    \
      "{\n.reg .pred keep;\nsetp.eq.b32 keep, 0, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types " " XPU_WGMMA_256_NAMES \
      ", {%128, %129, %130, %131}, %132, keep, 1, 1, 1;\n}\n"                      \
      : XPU_WGMMA_256_REGISTERS                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                         \
      : "memory")

/// c = a b^T + (keep ? c : 0) for a of 64 x 16 and b of N x 16, both in shared memory.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_shared(float (&c)[kCount], std::uint64_t a, std::uint64_t b,
                                             int keep) {
  if constexpr (kCount == 32) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_64_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_64_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 40) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_80_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_80_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 48) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_96_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_96_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 56) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_112_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_112_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 64) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_128_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_128_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 88) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_176_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_176_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 96) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_192_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_192_SHARED("f16.f16");
    }
  } else if constexpr (kCount == 128) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_256_SHARED("bf16.bf16");
    } else {
      XPU_WGMMA_256_SHARED("f16.f16");
    }
  } else {
    static_assert(kCount == 0, "no instruction of this width is declared here");
  }
}

/// c += a b for a of 64 x 16 in registers (the fragment of mma.cuh) and b of 16 x N in shared
/// memory.
template <bool kBfloat16, int kCount>
__device__ __forceinline__ void wgmma_transposed(float (&c)[kCount], const std::uint32_t (&a)[4],
                                                 std::uint64_t b) {
  if constexpr (kCount == 32) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_64_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_64_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 40) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_80_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_80_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 48) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_96_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_96_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 56) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_112_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_112_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 64) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_128_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_128_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 88) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_176_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_176_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 96) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_192_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_192_TRANSPOSED("f16.f16");
    }
  } else if constexpr (kCount == 128) {
    if constexpr (kBfloat16) {
      XPU_WGMMA_256_TRANSPOSED("bf16.bf16");
    } else {
      XPU_WGMMA_256_TRANSPOSED("f16.f16");
    }
  } else {
    static_assert(kCount == 0, "no instruction of this width is declared here");
  }
}

#undef XPU_WGMMA_64_TRANSPOSED
#undef XPU_WGMMA_64_SHARED
#undef XPU_WGMMA_64_REGISTERS
#undef XPU_WGMMA_64_NAMES
#undef XPU_WGMMA_80_TRANSPOSED
#undef XPU_WGMMA_80_SHARED
#undef XPU_WGMMA_80_REGISTERS
#undef XPU_WGMMA_80_NAMES
#undef XPU_WGMMA_96_TRANSPOSED
#undef XPU_WGMMA_96_SHARED
#undef XPU_WGMMA_96_REGISTERS
#undef XPU_WGMMA_96_NAMES
#undef XPU_WGMMA_112_TRANSPOSED
#undef XPU_WGMMA_112_SHARED
#undef XPU_WGMMA_112_REGISTERS
#undef XPU_WGMMA_112_NAMES
#undef XPU_WGMMA_128_TRANSPOSED
#undef XPU_WGMMA_128_SHARED
#undef XPU_WGMMA_128_REGISTERS
#undef XPU_WGMMA_128_NAMES
#undef XPU_WGMMA_176_TRANSPOSED
#undef XPU_WGMMA_176_SHARED
#undef XPU_WGMMA_176_REGISTERS
#undef XPU_WGMMA_176_NAMES
#undef XPU_WGMMA_192_TRANSPOSED
#undef XPU_WGMMA_192_SHARED
#undef XPU_WGMMA_192_REGISTERS
#undef XPU_WGMMA_192_NAMES
#undef XPU_WGMMA_256_TRANSPOSED
#undef XPU_WGMMA_256_SHARED
#undef XPU_WGMMA_256_REGISTERS
#undef XPU_WGMMA_256_NAMES

}  // namespace xpuruntime::cuda_raw

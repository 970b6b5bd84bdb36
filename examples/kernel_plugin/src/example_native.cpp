// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// A matrix product on the CPU in fp32, as a library of kernels: blocks of the right side are copied
// side by side into scratch memory, and multiplied row by row.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

#include "xpuruntime/kernel_plugin.h"

namespace {

enum Operand { kA, kB, kBias, kScaleA, kScaleB, kOut };

constexpr std::int64_t kBlockK = 128;
// How many columns a block has: the configurations of the kernel, the usual choice first.
constexpr std::int64_t kBlocksN[] = {64, 32, 128};

// What `prepare` settles for `launch`. Row and column strides count elements.
struct Matmul {
  std::int64_t m, n, k;
  std::int64_t a_row, a_column, b_row, b_column, out_row, out_column, bias;
  std::int64_t block_n;
};

void write(XpuText into, const char* sentence) {
  (void)std::snprintf(into.text, into.size, "%s", sentence);
}

bool is_fp32(const XpuTensor& x) { return x.code == 2 && x.bits == 32 && x.lanes == 1; }

std::int32_t supports(const XpuOpDescription* op, XpuText reason) {
  const XpuTensor& a = *op->operands[kA];
  const XpuTensor& b = *op->operands[kB];
  const XpuTensor& out = *op->operands[kOut];
  if (!is_fp32(a) || !is_fp32(out)) {
    write(reason, "it multiplies fp32 into fp32 only");
    return 0;
  }
  if (a.rank != 2 || b.rank != 2) {
    (void)std::snprintf(reason.text, reason.size,
                        "it has no batches: a has %d dimensions and b %d, and it takes 2 of each",
                        a.rank, b.rank);
    return 0;
  }
  if (op->activation != 0) {
    write(reason, "it has no activations");
    return 0;
  }
  return 1;
}

void* prepare_block(const XpuOpDescription* op, std::int64_t block_n, std::size_t* workspace,
                    XpuText error) {
  const XpuTensor& a = *op->operands[kA];
  const XpuTensor& b = *op->operands[kB];
  const XpuTensor& out = *op->operands[kOut];
  const XpuTensor* const bias = op->operands[kBias];  // NULL where the call has none
  auto* const made =
      new (std::nothrow) Matmul{out.shape[0],   out.shape[1],
                                a.shape[1],     a.strides[0],
                                a.strides[1],   b.strides[0],
                                b.strides[1],   out.strides[0],
                                out.strides[1], bias != nullptr ? bias->strides[0] : 0,
                                block_n};
  if (made == nullptr) {
    write(error, "there is no memory for its description");
    return nullptr;
  }
  *workspace = static_cast<std::size_t>((kBlockK + 1) * block_n) * sizeof(float);
  return made;
}

void* prepare(const XpuOpDescription* op, std::size_t* workspace, XpuText error) {
  return prepare_block(op, kBlocksN[0], workspace, error);
}

void write_config(std::int64_t block_n, XpuText into) {
  (void)std::snprintf(into.text, into.size, "block_n=%d", static_cast<int>(block_n));
}

// The configurations worth measuring, one at a time.
std::int32_t config(const XpuOpDescription* /*op*/, std::uint32_t index, XpuText into) {
  if (index >= sizeof(kBlocksN) / sizeof(kBlocksN[0])) return 0;
  write_config(kBlocksN[index], into);
  return 1;
}

void* prepare_config(const XpuOpDescription* op, const char* config, std::size_t* workspace,
                     XpuText error) {
  for (const std::int64_t block_n : kBlocksN) {
    char name[32];
    write_config(block_n, {name, sizeof name});
    if (std::strcmp(name, config) == 0) return prepare_block(op, block_n, workspace, error);
  }
  write(error, "its configurations are block_n=64, block_n=32 and block_n=128");
  return nullptr;
}

void chosen_config(const void* prepared, XpuText into) {
  write_config(static_cast<const Matmul*>(prepared)->block_n, into);
}

// Adds the part of a row of the product that columns `from` to `from + depth` of `a` make.
void add_block(const Matmul& x, const float* a, const float* block, std::int64_t depth,
               std::int64_t width, float* sums) {
  for (std::int64_t p = 0; p < depth; ++p) {
    const float factor = a[p * x.a_column];
    for (std::int64_t j = 0; j < width; ++j) sums[j] += factor * block[p * x.block_n + j];
  }
}

std::int32_t launch(void* prepared, void* const* operands, void* workspace, void* /*stream*/,
                    XpuText /*error*/) {
  const Matmul& x = *static_cast<const Matmul*>(prepared);
  const auto* const a = static_cast<const float*>(operands[kA]);
  const auto* const b = static_cast<const float*>(operands[kB]);
  const auto* const bias = static_cast<const float*>(operands[kBias]);
  auto* const out = static_cast<float*>(operands[kOut]);
  auto* const block = static_cast<float*>(workspace);
  float* const sums = block + kBlockK * x.block_n;
  for (std::int64_t column = 0; column < x.n; column += x.block_n) {
    const std::int64_t width = std::min(x.block_n, x.n - column);
    // Once also for k = 0, where the product is zero.
    for (std::int64_t from = 0; from == 0 || from < x.k; from += kBlockK) {
      const std::int64_t depth = std::min(kBlockK, x.k - from);
      for (std::int64_t p = 0; p < depth; ++p) {
        for (std::int64_t j = 0; j < width; ++j) {
          block[p * x.block_n + j] = b[(from + p) * x.b_row + (column + j) * x.b_column];
        }
      }
      for (std::int64_t i = 0; i < x.m; ++i) {
        float* const row = out + i * x.out_row + column * x.out_column;
        for (std::int64_t j = 0; j < width; ++j) {
          const float start = bias != nullptr ? bias[(column + j) * x.bias] : 0.0F;
          sums[j] = from == 0 ? start : row[j * x.out_column];
        }
        add_block(x, a + i * x.a_row + from * x.a_column, block, depth, width, sums);
        for (std::int64_t j = 0; j < width; ++j) row[j * x.out_column] = sums[j];
      }
    }
  }
  return 0;
}

void destroy(void* prepared) { delete static_cast<Matmul*>(prepared); }

constexpr XpuKernel kKernels[] = {{
    sizeof(XpuKernel),
    "example_native.matmul",
    XPU_MATMUL,
    XPU_CPU,
    "an example of a kernel in C++: a blocked loop",
    "fp32, two dimensions, any strides, with bias",
    "0.1.0",
    1,
    supports,
    prepare,
    launch,
    destroy,
    0,        // explicit_only: `auto` may choose it
    0,        // family_count
    nullptr,  // families
    nullptr,  // available: it needs nothing that could be missing
    nullptr,  // favoured
    config,
    prepare_config,
    chosen_config,
}};

}  // namespace

extern "C" __attribute__((visibility("default"))) const XpuKernel* xpuruntime_kernels(
    std::uint32_t abi, std::size_t* count) {
  if (abi != XPURUNTIME_KERNEL_ABI) return nullptr;
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

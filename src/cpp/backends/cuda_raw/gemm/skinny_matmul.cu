// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <limits>

#include "cuda_raw/gemm/skinny_matmul.h"
#include "cuda_raw/gemm/skinny_matmul_launch.cuh"
#include "xpuruntime/error.h"

namespace xpuruntime::cuda_raw {
namespace {

std::string number(std::int64_t x) { return std::to_string(x); }

// Why a stride cannot be served, where it matters at all.
std::string stride_refusal(const char* name, std::int64_t rows, std::int64_t row_length,
                           std::int64_t stride) {
  if (rows <= 1 || stride >= row_length) return {};
  return std::string("the rows of ") + name + " are " + number(row_length) +
         " elements long but start only " + number(stride) +
         " apart: pass a row-major tensor whose rows do not overlap";
}

// Whether rows can be read in units of 16 bytes that start on 16 bytes.
bool aligned(const void* data, std::int64_t rows, std::int64_t stride, std::int64_t batch,
             std::int64_t batch_stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (rows <= 1 || stride % 8 == 0) &&
         (batch <= 1 || batch_stride % 8 == 0);
}

}  // namespace

std::string skinny_matmul_refusal(const SkinnyMatmulArgs& args, const SkinnyMatmulDevice& device) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1024;
  if (device.cc_major < 8) {
    return "the skinny matmul needs compute capability 8.0 or later, and this device has " +
           number(device.cc_major) + ".x: use a matmul of cublas";
  }
  if (args.m < 0 || args.n < 0 || args.k < 0 || args.batch < 0) {
    return "m, n, k and batch are " + number(args.m) + ", " + number(args.n) + ", " +
           number(args.k) + " and " + number(args.batch) + ": none may be negative";
  }
  if (args.m > kSkinnyMaxM) {
    return "the skinny matmul serves at most " + number(kSkinnyMaxM) + " rows of a, and m is " +
           number(args.m) + ": use a matmul of cublas";
  }
  if (args.n > kMost || args.k > kMost) {
    return "n = " + number(args.n) + " and k = " + number(args.k) + ", and neither may pass " +
           number(kMost) + ": split the product";
  }
  if (args.activation < 0 || args.activation > 4) {
    return "activation " + number(args.activation) +
           " is unknown: 0 none, 1 ReLU, 2 GELU, 3 GELU by tanh, 4 SiLU";
  }
  std::string refusal = stride_refusal("a", args.m, args.k, args.lda);
  if (refusal.empty()) refusal = stride_refusal("out", args.m, args.n, args.ldout);
  if (refusal.empty() && args.b_is_transposed) {
    refusal = stride_refusal("b (as it lies in memory, [n, k])", args.n, args.k, args.ldb);
  } else if (refusal.empty()) {
    refusal = stride_refusal("b", args.k, args.n, args.ldb);
  }
  if (refusal.empty() && args.batch > 1 && (args.a_batch < 0 || args.b_batch < 0)) {
    refusal = "the batch stride of " + std::string(args.a_batch < 0 ? "a" : "b") +
              " is negative: pass a tensor that is not flipped";
  }
  return refusal;
}

std::size_t skinny_matmul_workspace(const SkinnyMatmulArgs&) { return 0; }

void skinny_matmul(const SkinnyMatmulArgs& args, void*, const SkinnyMatmulDevice& device,
                   cudaStream_t stream) {
  const std::string refusal = skinny_matmul_refusal(args, device);
  if (!refusal.empty()) throw InputError(refusal);
  if (args.m == 0 || args.n == 0 || args.batch == 0) return;

  skinny::Facts facts;
  facts.m = args.m;
  facts.n = args.n;
  facts.k = args.k;
  facts.batch = args.batch;
  facts.transposed = args.b_is_transposed;
  facts.aligned =
      args.k > 0 && aligned(args.a, args.m, args.lda, args.batch, args.a_batch) &&
      aligned(args.b, args.b_is_transposed ? args.n : args.k, args.ldb, args.batch, args.b_batch);
  facts.hopper = device.cc_major >= 9;
  facts.sm_count = device.sm_count;
  facts.shared_memory_limit = device.shared_memory_limit;
  const skinny::Plan plan = skinny::choose_plan(facts);

  const auto step = [](const void* data, std::int64_t elements) {
    return static_cast<const void*>(static_cast<const char*>(data) + 2 * elements);
  };
  SkinnyMatmulArgs part = args;
  for (std::int64_t first = 0; first < args.batch; first += skinny::kMaxBatchOfLaunch) {
    part.batch = std::min(skinny::kMaxBatchOfLaunch, args.batch - first);
    part.a = step(args.a, first * args.a_batch);
    part.b = step(args.b, first * args.b_batch);
    part.out = static_cast<char*>(args.out) + 2 * first * args.out_batch;
    if (plan.bulk) {
      skinny::launch_bulk(part, plan, stream);
    } else {
      skinny::launch_gather(part, plan, facts.hopper, stream);
    }
  }
}

}  // namespace xpuruntime::cuda_raw

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "cuda/check.h"
#include "cuda_api.h"
#include "cuda_raw/gemm/skinny_matmul.h"
#include "cuda_raw/gemm/skinny_matmul_plan.h"
#include "cuda_raw/gemm/skinny_matmul_tile.cuh"

// What the launches of both skinny matmul kernels share.
namespace xpuruntime::cuda_raw::skinny {

inline constexpr std::int64_t kMaxBatchOfLaunch = 65535;  // the y dimension of a grid

/// Both enqueue one launch: batch at most kMaxBatchOfLaunch, m, n and batch not 0.
void launch_bulk(const SkinnyMatmulArgs& args, const Plan& plan, cudaStream_t stream);
void launch_gather(const SkinnyMatmulArgs& args, const Plan& plan, bool hopper,
                   cudaStream_t stream);

/// Calls `body` with the type of the elements.
template <typename Body>
void with_type(bool bfloat16, Body&& body) {
  if (bfloat16) {
    body.template operator()<__nv_bfloat16>();
  } else {
    body.template operator()<__half>();
  }
}

inline Problem problem_of(const SkinnyMatmulArgs& args, const Plan& plan, int ring_offset) {
  Problem p{};
  p.a = args.a;
  p.b = args.b;
  p.bias = args.bias;
  p.out = args.out;
  p.lda = args.lda;
  p.ldb = args.ldb;
  p.ldout = args.ldout;
  p.a_batch = args.a_batch;
  p.b_batch = args.b_batch;
  p.out_batch = args.out_batch;
  p.m = static_cast<int>(args.m);
  p.n = static_cast<int>(args.n);
  p.k = static_cast<int>(args.k);
  p.activation = args.activation;
  p.stages = plan.stages;
  p.split = plan.split;
  p.ring_offset = ring_offset;
  p.prefetch = plan.prefetch;
  p.weights_are_constant = args.weights_are_constant;
  return p;
}

/// kKernel on a grid of all tiles; `hopper`: with clusters of `split` blocks, and it waits by
/// itself for the work ahead of it on the stream.
template <auto kKernel, typename... Parameters>
void enqueue(const Problem& p, std::int64_t batch, int columns, int threads, int shared,
             bool hopper, cudaStream_t stream, const Parameters&... parameters) {
  // Devices, by number, on which the kernel may have as much as it asks for. One bit is set twice
  // by two threads at worst; devices beyond 63 set the limit each time.
  static std::atomic<std::uint64_t> allowed{0};
  const int device = cuda::current_device();
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_acquire) & bit) == 0) {
    int limit = 0;
    cuda::check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                "cudaDeviceGetAttribute");
    cuda::check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
                "cudaFuncSetAttribute");
    allowed.fetch_or(bit, std::memory_order_release);
  }
  cudaLaunchConfig_t config{};
  const std::int64_t tiles = (static_cast<std::int64_t>(p.n) + columns - 1) / columns;
  config.gridDim = dim3(static_cast<unsigned>(tiles * p.split), static_cast<unsigned>(batch));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(p.split);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = !hopper ? 0 : p.split == 1 ? 1 : 2;
  cuda::check(cudaLaunchKernelEx(&config, kKernel, parameters...), "cudaLaunchKernelEx");
}

}  // namespace xpuruntime::cuda_raw::skinny

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/gemm/skinny_matmul_gather.cuh"
#include "cuda_raw/gemm/skinny_matmul_launch.cuh"

namespace xpuruntime::cuda_raw::skinny {
namespace {

template <typename T, typename S>
void launch(const SkinnyMatmulArgs& args, const Plan& plan, bool hopper, cudaStream_t stream) {
  const Problem p = problem_of(args, plan, gather_fixed_bytes<S>(plan.split));
  enqueue<multiply_gathered<T, S>>(p, args.batch, S::kColumns, S::kThreads,
                                   gather_shared_bytes<S>(p.split), hopper, stream, p);
}

}  // namespace

void launch_gather(const SkinnyMatmulArgs& args, const Plan& plan, bool hopper,
                   cudaStream_t stream) {
  with_type(args.bfloat16, [&]<typename T>() {
    with_gather_shape(args.m, args.b_is_transposed,
                      [&]<typename S>() { launch<T, S>(args, plan, hopper, stream); });
  });
}

}  // namespace xpuruntime::cuda_raw::skinny

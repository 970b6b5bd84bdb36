// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/gemm/skinny_matmul_bulk.cuh"
#include "cuda_raw/gemm/skinny_matmul_launch.cuh"
#include "cuda_raw/tensor_map.h"

namespace xpuruntime::cuda_raw::skinny {
namespace {

/// An operand of rows of `length` elements, one contiguous row after another `stride` apart.
struct Operand {
  const char* name;
  const void* data;
  std::int64_t length, rows, stride, batch, batch_stride;

  bool batched() const { return batch > 1 && batch_stride != 0; }
};

/// The map of it in boxes of `box_rows` by `box_length`; says whether a box holds all its panels.
bool make_map(CUtensorMap& map, const Operand& operand, int box_rows, int box_length,
              bool bfloat16) {
  const bool by_panels = operand.length % kPanel == 0;
  map = encode_tensor_map(
      {.name = operand.name,
       .data = operand.data,
       .bfloat16 = bfloat16,
       .lengths = {by_panels ? kPanel : operand.length, operand.rows,
                   by_panels ? operand.length / kPanel : 1, operand.batched() ? operand.batch : 1},
       .strides = {operand.stride, kPanel, operand.batch_stride},
       .box = {kPanel, box_rows, by_panels ? box_length / kPanel : 1, 1},
       .fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_128B});
  return by_panels;
}

template <typename T, typename S>
void launch(const SkinnyMatmulArgs& args, const Plan& plan, cudaStream_t stream) {
  const Problem p = problem_of(args, plan, bulk_fixed_bytes<S>(plan.split));
  const Operand a{"a", args.a, args.k, args.m, args.lda, args.batch, args.a_batch};
  const Operand b{"b",
                  args.b,
                  S::kTransposed ? args.k : args.n,
                  S::kTransposed ? args.n : args.k,
                  args.ldb,
                  args.batch,
                  args.b_batch};
  Maps maps;
  maps.a_batched = a.batched();
  maps.b_batched = b.batched();
  maps.a_by_panels = make_map(maps.a, a, p.m, S::kChunk, args.bfloat16);
  maps.b_by_panels = make_map(maps.b, b, S::kRows, S::kRowLength, args.bfloat16);
  enqueue<multiply_bulk<T, S>>(p, args.batch, S::kColumns, S::kThreads + 32,
                               bulk_shared_bytes<S>(p.stages, p.split), true, stream, p, maps);
}

}  // namespace

void launch_bulk(const SkinnyMatmulArgs& args, const Plan& plan, cudaStream_t stream) {
  with_type(args.bfloat16, [&]<typename T>() {
    for_bulk_shapes(args.m, args.b_is_transposed, [&]<typename S>() {
      if (S::kColumns == plan.columns) launch<T, S>(args, plan, stream);
    });
  });
}

}  // namespace xpuruntime::cuda_raw::skinny

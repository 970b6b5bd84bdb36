// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <string>

#include "cuda_raw/skinny_matmul_bulk.cuh"
#include "cuda_raw/skinny_matmul_launch.cuh"
#include "xpuruntime/error.h"

namespace xpuruntime::cuda_raw::skinny {
namespace {

using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill);

// The driver library is not linked: the runtime knows where it is.
Encode* encode_function() {
  static Encode* const kFunction = [] {
    constexpr unsigned int kVersion = 12000;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_launch(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kVersion,
                                                  cudaEnableDefault, &result),
                 "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    return reinterpret_cast<Encode*>(found);
  }();
  return kFunction;
}

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
  const auto number = [](std::int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {number(by_panels ? kPanel : operand.length), number(operand.rows),
                               number(by_panels ? operand.length / kPanel : 1),
                               number(operand.batched() ? operand.batch : 1)};
  // Of a dimension of length 1 the stride is not used, but must be valid.
  constexpr std::int64_t kAnyStride = 16;
  const cuuint64_t strides[3] = {number(operand.rows > 1 ? 2 * operand.stride : kAnyStride),
                                 number(by_panels ? 2 * kPanel : kAnyStride),
                                 number(operand.batched() ? 2 * operand.batch_stride : kAnyStride)};
  const cuuint32_t box[4] = {kPanel, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(by_panels ? box_length / kPanel : 1), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult status = encode_function()(
      &map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(operand.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw CudaError(std::string("the driver refused a tensor map of ") + operand.name +
                        " (status " + std::to_string(static_cast<int>(status)) +
                        "): pass a contiguous tensor",
                    "cuda:" + std::to_string(current_device()), static_cast<int>(status));
  }
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <string>

#include "flash_backward_sm90.cuh"
#include "xpuruntime/error.h"

namespace xpuruntime::cuda_raw {
namespace {

using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill);

// The driver library is not linked: the runtime knows where it is.
Encode* encoder() {
  static Encode* const kFound = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    flash_backward_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                          cudaEnableDefault, &result),
                         "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    return reinterpret_cast<Encode*>(found);
  }();
  return kFound;
}

// [batch, heads, rows, head_dim] in boxes of `box_rows` rows and 64 columns.
CUtensorMap tensor_map(const FlashBackwardArgs& args, const char* name, const void* base,
                       const std::int64_t (&strides)[3], std::int64_t heads, std::int64_t rows,
                       int box_rows) {
  const std::int64_t lengths[4] = {args.head_dim, rows, heads, args.batch};
  cuuint64_t dimensions[4];
  cuuint64_t bytes[3];
  for (int i = 0; i < 4; ++i) dimensions[i] = static_cast<cuuint64_t>(lengths[i]);
  for (int i = 0; i < 3; ++i) {
    // Along a dimension of length 1 the stride is never used and may be anything.
    const std::int64_t stride = lengths[i + 1] == 1 ? args.head_dim : strides[2 - i];
    bytes[i] = static_cast<cuuint64_t>(2 * stride);
  }
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = encoder()(
      &map, args.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(base), dimensions, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    int device = -1;
    (void)cudaGetDevice(&device);
    throw CudaError(std::string("the driver refused a tensor map of ") + name + " (status " +
                        std::to_string(static_cast<int>(status)) + "): pass a contiguous tensor",
                    "cuda:" + std::to_string(device), static_cast<int>(status));
  }
  return map;
}

// The copy engine takes strides from 16 bytes to below 2^40; 0 and negative ones it does not.
bool copyable(const std::int64_t (&strides)[3], const std::int64_t (&lengths)[3]) {
  for (int i = 0; i < 3; ++i) {
    if (lengths[i] > 1 && (strides[i] <= 0 || strides[i] >= (std::int64_t{1} << 38))) return false;
  }
  return true;
}

template <bool kBfloat16, int kColumns>
void launch(FlashBackwardParams& params, cudaStream_t stream) {
  using Shape = FlashBackwardSm90Shape<kColumns>;
  const FlashBackwardArgs& args = params.args;
  FlashBackwardMaps maps;
  maps.q = tensor_map(args, "q", args.q, args.q_strides, args.heads, args.q_length, Shape::kRows);
  maps.k =
      tensor_map(args, "k", args.k, args.k_strides, args.kv_heads, args.kv_length, Shape::kKeys);
  maps.v =
      tensor_map(args, "v", args.v, args.v_strides, args.kv_heads, args.kv_length, Shape::kKeys);
  maps.grad_out = tensor_map(args, "grad_out", args.grad_out, args.grad_out_strides, args.heads,
                             args.q_length, Shape::kRows);
  params.columns = kColumns;
  params.kv_blocks = (params.kv_length + Shape::kKeys - 1) / Shape::kKeys;
  const std::int64_t blocks = args.batch * args.kv_heads * params.kv_blocks;
  const auto kernel = flash_backward_sm90_kernel<kBfloat16, Shape>;
  flash_backward_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
      "cudaFuncSetAttribute");
  kernel<<<static_cast<unsigned int>(blocks), Shape::kThreads, Shape::kBytes, stream>>>(params,
                                                                                        maps);
  flash_backward_check(cudaGetLastError(), "flash_backward_sm90_kernel");
}

}  // namespace

bool flash_backward_sm90_serves(const FlashBackwardArgs& args, const FlashBackwardDevice& device) {
  const std::int64_t rows[3] = {args.batch, args.heads, args.q_length};
  const std::int64_t keys[3] = {args.batch, args.kv_heads, args.kv_length};
  return device.cc_major == 9 && device.cc_minor == 0 && args.mask_kind == 0 &&
         args.dropout_p == 0.0F && args.head_dim <= 128 &&
         args.batch * args.heads * args.q_length * args.kv_length > 0 &&
         copyable(args.q_strides, rows) && copyable(args.k_strides, keys) &&
         copyable(args.v_strides, keys) && copyable(args.grad_out_strides, rows);
}

void flash_backward_sm90(FlashBackwardParams& params, cudaStream_t stream) {
  if (params.args.head_dim <= 64) {
    return params.args.bfloat16 ? launch<true, 64>(params, stream)
                                : launch<false, 64>(params, stream);
  }
  return params.args.bfloat16 ? launch<true, 128>(params, stream)
                              : launch<false, 128>(params, stream);
}

}  // namespace xpuruntime::cuda_raw

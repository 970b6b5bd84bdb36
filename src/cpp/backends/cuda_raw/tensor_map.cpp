// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/tensor_map.h"

#include <string>

#include "cuda/driver_function.h"
#include "cuda_api.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cuda_raw {
namespace {

using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill);

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAnyStride = 16;  // in bytes, valid for every tensor

}  // namespace

CUtensorMap encode_tensor_map(const TensorMapSource& source) {
  static Encode* const kEncode = cuda::driver_function<Encode>("cuTensorMapEncodeTiled");
  cuuint64_t lengths[4];
  cuuint64_t strides[3];
  cuuint32_t box[4];
  for (int i = 0; i < 4; ++i) {
    lengths[i] = static_cast<cuuint64_t>(source.lengths[i]);
    box[i] = static_cast<cuuint32_t>(source.box[i]);
  }
  for (int i = 0; i < 3; ++i) {
    strides[i] = static_cast<cuuint64_t>(
        source.lengths[i + 1] == 1 ? kAnyStride : kElementBytes * source.strides[i]);
  }
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = kEncode(
      &map, source.bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(source.data), lengths, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, source.fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw CudaError(std::string("the driver refused a tensor map of ") + source.name + " (status " +
                        std::to_string(static_cast<int>(status)) + "): pass a contiguous tensor",
                    "cuda:" + std::to_string(cuda::current_device()), static_cast<int>(status));
  }
  return map;
}

CUtensorMap encode_heads_map(const char* name, const void* data, bool bfloat16,
                             const std::int64_t (&lengths)[4], const std::int64_t (&strides)[3],
                             int box_rows) {
  return encode_tensor_map({.name = name,
                            .data = data,
                            .bfloat16 = bfloat16,
                            .lengths = {lengths[3], lengths[2], lengths[1], lengths[0]},
                            .strides = {strides[2], strides[1], strides[0]},
                            .box = {64, box_rows, 1, 1},
                            .fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

}  // namespace xpuruntime::cuda_raw

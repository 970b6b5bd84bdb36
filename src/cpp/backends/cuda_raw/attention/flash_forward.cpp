// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/attention/flash_forward.h"

#include <cmath>

namespace xpuruntime::cuda_raw {
namespace {

constexpr std::int64_t kLongest = 0x7fffffff - 256;
constexpr std::int64_t kShortestTile = 64;

std::string layout_refusal(const char* name, const void* pointer, const std::int64_t (&strides)[3],
                           std::int64_t batch, std::int64_t heads, std::int64_t rows) {
  if (batch * heads * rows == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    return std::string(name) +
           " does not start at a multiple of 16 bytes: pass a tensor that starts at its storage, "
           "or a copy";
  }
  const std::int64_t sizes[3] = {batch, heads, rows};
  const char* const dimensions[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] > 1 && strides[i] % 8 != 0) {
      return "the " + std::string(dimensions[i]) + " stride of " + name + " is " +
             std::to_string(strides[i]) +
             " elements and rows are read 8 elements at a time: pass a contiguous tensor";
    }
  }
  return {};
}

// The bulk copy engine takes what a tensor map can say.
bool fits_tensor_map(const std::int64_t (&strides)[3], std::int64_t batch, std::int64_t heads,
                     std::int64_t rows) {
  constexpr std::int64_t kStrideLimit = std::int64_t{1} << 39;  // elements: 2^40 bytes
  const std::int64_t sizes[3] = {batch, heads, rows};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] > 1 && (strides[i] < 0 || strides[i] >= kStrideLimit)) return false;
  }
  return true;
}

}  // namespace

std::string flash_forward_refusal(const FlashForwardArgs& args, int cc_major, int cc_minor) {
  if (cc_major < 8) {
    return "the GPU has compute capability " + std::to_string(cc_major) + "." +
           std::to_string(cc_minor) + " and flash attention needs 8.0: choose another kernel";
  }
  if (args.head_dim < 32 || args.head_dim > 256 || args.head_dim % 8 != 0) {
    return "head_dim is " + std::to_string(args.head_dim) +
           " and must be a multiple of 8 from 32 to 256: pad the last dimension with zeros";
  }
  if (args.kv_heads <= 0 ? args.heads != 0 : args.heads % args.kv_heads != 0) {
    return "q has " + std::to_string(args.heads) + " heads, not a multiple of the " +
           std::to_string(args.kv_heads) + " of k and v: repeat the heads of k and v";
  }
  if (args.q_length > kLongest || args.kv_length > kLongest) {
    return "a length is above " + std::to_string(kLongest) + ": split the sequence";
  }
  const std::int64_t tiles = (args.q_length + kShortestTile - 1) / kShortestTile;
  if (args.batch > kLongest || args.heads > kLongest ||
      (args.batch != 0 && args.heads != 0 && tiles != 0 &&
       args.batch > kLongest / args.heads / tiles)) {
    return "batch * heads * q_length is too large for one launch: split the batch";
  }
  if (args.mask_kind < kMaskNone || args.mask_kind > kMaskFloat32) {
    return "mask_kind is " + std::to_string(args.mask_kind) + " and must be 0, 1, 2 or 3";
  }
  if (!(args.dropout_p >= 0.0f && args.dropout_p < 1.0f)) {
    return "dropout_p is " + std::to_string(args.dropout_p) + " and must be in [0, 1)";
  }
  if (!std::isfinite(args.scale)) {
    return "scale is " + std::to_string(args.scale) + " and must be finite";
  }
  std::string why =
      layout_refusal("q", args.q, args.q_strides, args.batch, args.heads, args.q_length);
  if (why.empty()) {
    why = layout_refusal("k", args.k, args.k_strides, args.batch, args.kv_heads, args.kv_length);
  }
  if (why.empty()) {
    why = layout_refusal("v", args.v, args.v_strides, args.batch, args.kv_heads, args.kv_length);
  }
  if (why.empty()) {
    why = layout_refusal("out", args.out, args.out_strides, args.batch, args.heads, args.q_length);
  }
  return why;
}

FlashPath flash_forward_path(const FlashForwardArgs& args, int cc_major, int cc_minor) {
  const bool wgmma = cc_major == 9 && cc_minor == 0 && args.kv_length > 0 &&
                     fits_tensor_map(args.q_strides, args.batch, args.heads, args.q_length) &&
                     fits_tensor_map(args.k_strides, args.batch, args.kv_heads, args.kv_length) &&
                     fits_tensor_map(args.v_strides, args.batch, args.kv_heads, args.kv_length);
  return wgmma ? FlashPath::kWgmma : FlashPath::kMma;
}

void flash_forward(const FlashForwardArgs& args, int cc_major, int cc_minor, int sm_count,
                   cudaStream_t stream) {
  if (flash_forward_path(args, cc_major, cc_minor) == FlashPath::kWgmma) {
    flash_forward_wgmma(args, sm_count, stream);
  } else {
    flash_forward_mma(args, stream);
  }
}

}  // namespace xpuruntime::cuda_raw

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cmath>

#include "cuda/check.h"
#include "cuda_raw/attention/flash_backward.h"
#include "cuda_raw/attention/flash_backward_params.cuh"

namespace xpuruntime::cuda_raw {
namespace {

constexpr std::int64_t kLongest = (std::int64_t{1} << 31) - 256;
constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;

std::size_t align(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::string misplaced(const char* name, const void* pointer, const std::int64_t (&strides)[3],
                      const std::int64_t (&lengths)[3]) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    return std::string(name) + " is not aligned to 16 bytes: copy it to an aligned tensor";
  }
  static constexpr const char* kDimensions[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (lengths[i] > 1 && strides[i] % 8 != 0) {
      return std::string(name) + " has a " + kDimensions[i] + " stride of " +
             std::to_string(strides[i]) +
             " elements, not a multiple of 8: copy it to a contiguous tensor";
    }
  }
  return {};
}

}  // namespace

FlashBackwardWorkspace::FlashBackwardWorkspace(const FlashBackwardArgs& args) {
  const int dim = args.head_dim;
  columns = dim <= 64 ? 64 : dim <= 96 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256;
  const std::size_t most_columns = columns == 96 ? 128 : static_cast<std::size_t>(columns);
  rows = (args.q_length + kFlashRowTile - 1) / kFlashRowTile * kFlashRowTile;
  const auto all_rows = static_cast<std::size_t>(args.batch * args.heads * rows);
  lse = 0;
  delta = lse + align(all_rows * sizeof(float));
  sums = delta + align(all_rows * sizeof(float));
  turns = sums + align(all_rows * most_columns * sizeof(float));
  ticket = turns + align(all_rows / 32 * sizeof(int));
  bytes = ticket + align(sizeof(int));
}

std::size_t flash_backward_workspace(const FlashBackwardArgs& args) {
  return FlashBackwardWorkspace(args).bytes;
}

std::string flash_backward_refusal(const FlashBackwardArgs& args,
                                   const FlashBackwardDevice& device) {
  if (device.cc_major < 8) {
    return "needs compute capability 8.0 or newer, the device has " +
           std::to_string(device.cc_major) + "." + std::to_string(device.cc_minor);
  }
  if (args.head_dim < 32 || args.head_dim > 256 || args.head_dim % 8 != 0) {
    return "head_dim is " + std::to_string(args.head_dim) +
           ": it must be a multiple of 8 from 32 to 256; pad q, k and v with zeros";
  }
  if (args.batch < 0 || args.heads < 0 || args.q_length < 0 || args.kv_length < 0 ||
      args.q_length > kLongest || args.kv_length > kLongest) {
    return "batch, heads, q_length and kv_length must be from 0 to 2^31 - 256";
  }
  if (args.kv_heads < 1 ? args.heads != 0 : args.heads % args.kv_heads != 0) {
    return "heads (" + std::to_string(args.heads) + ") must be a multiple of kv_heads (" +
           std::to_string(args.kv_heads) + ")";
  }
  if (args.mask_kind < 0 || args.mask_kind > 3) {
    return "mask_kind is " + std::to_string(args.mask_kind) + ": it must be from 0 to 3";
  }
  if (!(args.dropout_p >= 0.0F && args.dropout_p < 1.0F)) {
    return "dropout_p is " + std::to_string(args.dropout_p) + ": it must be in [0, 1)";
  }
  if (!std::isfinite(args.scale)) return "scale is not finite: give a finite number";
  const std::int64_t rows[3] = {args.batch, args.heads, args.q_length};
  const std::int64_t keys[3] = {args.batch, args.kv_heads, args.kv_length};
  for (const std::string& reason :
       {misplaced("q", args.q, args.q_strides, rows), misplaced("k", args.k, args.k_strides, keys),
        misplaced("v", args.v, args.v_strides, keys),
        misplaced("out", args.out, args.out_strides, rows),
        misplaced("grad_out", args.grad_out, args.grad_out_strides, rows),
        misplaced("grad_q", args.grad_q, args.grad_q_strides, rows),
        misplaced("grad_k", args.grad_k, args.grad_k_strides, keys),
        misplaced("grad_v", args.grad_v, args.grad_v_strides, keys)}) {
    if (!reason.empty()) return reason;
  }
  const FlashBackwardWorkspace workspace(args);
  const int needed = flash_backward_mma_shared_memory(workspace.columns);
  if (needed > device.shared_memory) {
    return "head_dim " + std::to_string(args.head_dim) + " needs " + std::to_string(needed) +
           " bytes of shared memory a block, the device has " +
           std::to_string(device.shared_memory) + ": use a smaller head_dim or another kernel";
  }
  if (args.batch * args.kv_heads * ((args.kv_length + 63) / 64) > kMaxBlocks ||
      args.batch * args.heads * (workspace.rows / 8) > kMaxBlocks ||
      args.heads / std::max<std::int64_t>(args.kv_heads, 1) * (workspace.rows / 32) > kMaxBlocks) {
    return "batch * heads * length is too large for one launch: split the batch";
  }
  return {};
}

void flash_backward(const FlashBackwardArgs& args, void* workspace,
                    const FlashBackwardDevice& device, cudaStream_t stream) {
  const FlashBackwardWorkspace places(args);
  char* memory = static_cast<char*>(workspace);
  FlashBackwardParams params{};
  params.args = args;
  params.lse = reinterpret_cast<float*>(memory + places.lse);
  params.delta = reinterpret_cast<float*>(memory + places.delta);
  params.sums = reinterpret_cast<float*>(memory + places.sums);
  params.turns = reinterpret_cast<int*>(memory + places.turns);
  params.ticket = reinterpret_cast<int*>(memory + places.ticket);
  params.rows = static_cast<int>(places.rows);
  params.columns = places.columns;
  params.q_length = static_cast<int>(args.q_length);
  params.kv_length = static_cast<int>(args.kv_length);
  params.heads = static_cast<int>(args.heads);
  params.group = args.kv_heads == 0 ? 0 : static_cast<int>(args.heads / args.kv_heads);
  // Heads side by side while q, grad_out and the sums of grad_q of them stay in the L2 cache.
  constexpr std::int64_t kCacheBytes = std::int64_t{64} << 20;
  constexpr std::int64_t kMaxHeads = 16;
  const std::int64_t head_bytes = params.group * places.rows * places.columns * 8;
  params.section = static_cast<int>(
      std::clamp<std::int64_t>(kCacheBytes / std::max<std::int64_t>(head_bytes, 1), 1, kMaxHeads));
  params.shift = args.causal_bottom_right ? params.kv_length - params.q_length : 0;
  params.scale_log2 = args.scale * 1.4426950408889634F;

  const bool any_rows = args.batch * args.heads * args.q_length > 0;
  if (any_rows) {
    cuda::check(cudaMemsetAsync(memory + places.sums, 0, places.bytes - places.sums, stream),
                "cudaMemsetAsync");
    flash_backward_rows(params, stream);
  }
  if (flash_backward_sm90_serves(args, device)) {
    flash_backward_sm90(params, stream);
  } else {
    flash_backward_mma(params, device.shared_memory, stream);
  }
  if (any_rows) flash_backward_grad_q(params, stream);
}

}  // namespace xpuruntime::cuda_raw

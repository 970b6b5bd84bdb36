// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "cuda_raw/norm.h"
#include "cuda_raw/norm_backward_kernels.cuh"
#include "cuda_raw/norm_launch.h"

namespace xpuruntime::cuda_raw {
namespace norm {
namespace {

constexpr int kBlockThreads = 512;

struct Plan {
  int width = 1;     // elements an access
  int packs = 0;     // accesses a thread; 0: rows too long for registers
  int threads = 32;  // a row
  int teams = 1;     // rows at once in a block
  std::int64_t blocks = 1;
  std::int64_t parts = 0;  // rows of the partial sums
  std::int64_t rows_per_part = 0;
};

Plan make_plan(const NormBackwardArgs& args, int sm_count) {
  Plan plan;
  const bool wide = aligned(args.type, args.columns,
                            {{args.grad_y, args.grad_y_row_stride},
                             {args.x, args.x_row_stride},
                             {args.grad_sum, args.grad_sum_row_stride},
                             {args.grad_x, args.grad_x_row_stride},
                             {args.weight, 0}});
  plan.width = wide ? kAccessBytes / size_of(args.type) : 1;
  const std::int64_t packs = args.columns / plan.width;
  const std::int64_t rows = std::max<std::int64_t>(args.rows, 1);
  // Elements a thread: 8, 16, 24 or 32.
  for (const int elements : {8, 16, 24, 32}) {
    const int each = elements / plan.width;
    const std::int64_t threads = ceil_div(packs, std::int64_t{each} * kWarp) * kWarp;
    if (threads > (elements == (wide ? 32 : 8) ? kBlockThreads : elements == 16 ? 256 : 32))
      continue;
    if (!wide && elements > 8) break;
    plan.packs = each;
    plan.threads = static_cast<int>(threads);
    plan.teams =
        static_cast<int>(std::min<std::int64_t>(kBlockThreads / threads, ceil_div(rows, sm_count)));
    plan.blocks = std::min<std::int64_t>(ceil_div(rows, plan.teams), sm_count);
    plan.parts = args.rows == 0 ? 0 : plan.blocks;
    return plan;
  }
  plan.threads = kMostWarps * kWarp;
  plan.blocks = rows;
  const std::int64_t wanted = std::max<std::int64_t>(1, sm_count * 8 / ceil_div(packs, kWarp));
  plan.rows_per_part = std::max<std::int64_t>(kColumnTeams, ceil_div(rows, wanted));
  plan.parts = ceil_div(args.rows, plan.rows_per_part);
  return plan;
}

int shared_limit() {
  int device = 0;
  int bytes = 0;
  check_launch(cudaGetDevice(&device), "cudaGetDevice");
  check_launch(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
  return bytes - 1024;  // what the kernel has statically
}

template <typename T, int kWidth, int kPacks>
void launch_rows(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                 cudaStream_t stream) {
  auto* const kernel = backward_rows<T, kWidth, kPacks, kBlockThreads, 1, kWidth == 1>;
  int shared = static_cast<int>(args.columns * static_cast<std::int64_t>(sizeof(float)));
  int stages = 0;
  if (kWidth > 1) {
    const int inputs = args.grad_sum != nullptr ? 3 : 2;
    const int stage = inputs * kPacks * plan.teams * plan.threads * kAccessBytes;
    stages = std::min(kMostStages, shared_limit() / stage);
    shared = std::max(shared, stages * stage);
  }
  allow_shared(reinterpret_cast<const void*>(kernel), static_cast<std::size_t>(shared));
  launch({static_cast<unsigned>(plan.blocks)},
         {static_cast<unsigned>(plan.threads), static_cast<unsigned>(plan.teams)},
         static_cast<std::size_t>(shared), stream, false, kernel, args, partials, stages);
}

template <typename T, int kWidth>
void launch_any(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                cudaStream_t stream) {
  if (plan.packs == 0) {
    if (plan.parts > 0 && (args.grad_weight != nullptr || args.grad_bias != nullptr)) {
      const auto strips = static_cast<unsigned>(ceil_div(args.columns / kWidth, kWarp));
      launch({strips, static_cast<unsigned>(plan.parts)}, {kWarp, kColumnTeams}, 0, stream, false,
             backward_columns<T, kWidth>, args, partials, plan.rows_per_part);
    }
    launch({static_cast<unsigned>(plan.blocks)}, {static_cast<unsigned>(plan.threads)}, 0, stream,
           false, backward_long_rows<T, kWidth>, args);
    return;
  }
  if constexpr (kWidth == 1) {
    launch_rows<T, 1, 8>(args, partials, plan, stream);
  } else {
    constexpr int kUnit = 8 / kWidth;
    switch (plan.packs / kUnit) {
      case 1:
        launch_rows<T, kWidth, kUnit>(args, partials, plan, stream);
        break;
      case 2:
        launch_rows<T, kWidth, 2 * kUnit>(args, partials, plan, stream);
        break;
      case 3:
        if constexpr (kUnit == 1) launch_rows<T, kWidth, 3>(args, partials, plan, stream);
        break;
      default:
        if constexpr (kUnit == 1) launch_rows<T, kWidth, 4>(args, partials, plan, stream);
        break;
    }
  }
}

template <typename T>
void launch_sum(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(args.columns, kWarp)),
                  args.grad_bias != nullptr ? 2U : 1U);
  launch(grid, {kWarp, kPartTeams}, 0, stream, true, add_partials<T>, partials,
         static_cast<int>(plan.parts), static_cast<int>(args.columns),
         static_cast<T*>(args.grad_weight), static_cast<T*>(args.grad_bias));
}

}  // namespace
}  // namespace norm

std::size_t norm_backward_workspace(const NormBackwardArgs& args, int sm_count) {
  const std::size_t tensors =
      (args.grad_weight != nullptr ? 1U : 0U) + (args.grad_bias != nullptr ? 1U : 0U);
  if (tensors == 0) return 0;
  const norm::Plan plan = norm::make_plan(args, sm_count);
  return tensors * static_cast<std::size_t>(plan.parts) * static_cast<std::size_t>(args.columns) *
         sizeof(float);
}

void norm_backward(const NormBackwardArgs& args, void* workspace, int /*cc_major*/, int sm_count,
                   cudaStream_t stream) {
  const norm::Plan plan = norm::make_plan(args, sm_count);
  norm::Partials partials{};
  auto* at = static_cast<float*>(workspace);
  if (args.grad_weight != nullptr) {
    partials.weight = at;
    at += plan.parts * args.columns;
  }
  if (args.grad_bias != nullptr) partials.bias = at;
  if (args.rows > 0) {
    norm::with_type(args.type, [&]<typename T>() {
      if (plan.width > 1) {
        norm::launch_any<T, norm::kAccessBytes / sizeof(T)>(args, partials, plan, stream);
      } else {
        norm::launch_any<T, 1>(args, partials, plan, stream);
      }
    });
  }
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) return;
  norm::with_type(args.weight_type,
                  [&]<typename T>() { norm::launch_sum<T>(args, partials, plan, stream); });
}

}  // namespace xpuruntime::cuda_raw

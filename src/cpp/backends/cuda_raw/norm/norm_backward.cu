// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cstdint>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_backward_kernels.cuh"
#include "cuda_raw/norm/norm_backward_long.cuh"
#include "cuda_raw/norm/norm_launch.h"

namespace xpuruntime::cuda_raw {
namespace norm {
namespace {

constexpr int kBestStages = 2;

/// Calls `body` with the Shape for rows of this length; not at all where none holds one.
template <bool kWide, typename Body>
void with_shape(std::int64_t columns, Body&& body) {
  if constexpr (!kWide) {
    if (columns <= 256) {
      body.template operator()<Shape<8, 1, 8, 3>>();
    } else if (columns <= 4096) {
      body.template operator()<Shape<8, 16, 1, 1>>();
    }
  } else if (columns <= 256) {
    body.template operator()<Shape<8, 1, 8, 3>>();
  } else if (columns <= 512) {
    body.template operator()<Shape<16, 1, 8, 2>>();
  } else if (columns <= 1024) {
    body.template operator()<Shape<16, 2, 4, 2>>();
  } else if (columns <= 2048) {
    body.template operator()<Shape<16, 4, 2, 2>>();
  } else if (columns <= 4096) {
    body.template operator()<Shape<16, 8, 2, 1>>();
  } else if (columns <= 8192) {
    body.template operator()<Shape<16, 16, 1, 1>>();
  } else if (columns <= 16384) {
    body.template operator()<Shape<32, 16, 1, 1>>();
  }
}

struct Plan {
  bool wide = false;      // accesses of 16 bytes; otherwise of one element
  bool long_rows = true;  // too long for registers
  std::int64_t blocks = 0;
  std::int64_t parts = 0;  // rows of the partial sums
  std::int64_t rows_per_part = 0;
};

bool is_wide(const NormBackwardArgs& args) {
  return aligned(args.type, args.columns,
                 {{args.grad_y, args.grad_y_row_stride},
                  {args.x, args.x_row_stride},
                  {args.grad_sum, args.grad_sum_row_stride},
                  {args.grad_x, args.grad_x_row_stride},
                  {args.weight, 0}});
}

Plan make_plan(const NormBackwardArgs& args, bool wide, int sm_count) {
  Plan plan;
  plan.wide = wide;
  auto settle = [&]<typename Chosen>() {
    plan.long_rows = false;
    plan.blocks = std::min<std::int64_t>(ceil_div(args.rows, Chosen::kTeams),
                                         std::int64_t{sm_count} * Chosen::kBlocks);
    plan.parts = plan.blocks;
  };
  if (plan.wide) {
    with_shape<true>(args.columns, settle);
  } else {
    with_shape<false>(args.columns, settle);
  }
  if (!plan.long_rows) return plan;
  const std::int64_t packs = args.columns / (plan.wide ? kAccessBytes / size_of(args.type) : 1);
  const std::int64_t wanted =
      std::max<std::int64_t>(1, std::int64_t{sm_count} * 8 / ceil_div(packs, kWarp));
  plan.blocks = args.rows;
  plan.rows_per_part = std::max<std::int64_t>(kColumnTeams, ceil_div(args.rows, wanted));
  plan.parts = ceil_div(args.rows, plan.rows_per_part);
  return plan;
}

int shared_limit() {
  int device = 0;
  int bytes = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
              "cudaDeviceGetAttribute");
  return bytes - 1024;  // what the kernel has statically
}

template <typename T, int kWidth, typename Chosen>
void launch_rows(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                 cudaStream_t stream) {
  const bool extra = args.grad_sum != nullptr;
  auto* const kernel =
      extra ? backward_rows<T, kWidth, Chosen, true> : backward_rows<T, kWidth, Chosen, false>;
  int shared = static_cast<int>(args.columns) * Chosen::kTeams * static_cast<int>(sizeof(float));
  int stages = 0;
  if (kWidth > 1) {
    const int stage = (extra ? 3 : 2) * Chosen::kElements * static_cast<int>(sizeof(T)) *
                      Chosen::kThreads * Chosen::kTeams;
    stages = std::clamp(shared_limit() / Chosen::kBlocks / stage, 1, kBestStages);
    shared = std::max(shared, stages * stage);
  }
  allow_shared(reinterpret_cast<const void*>(kernel), static_cast<std::size_t>(shared));
  launch({static_cast<unsigned>(plan.blocks)}, {Chosen::kThreads, Chosen::kTeams},
         static_cast<std::size_t>(shared), stream, false, kernel, args, partials, stages);
}

template <typename T, int kWidth>
void launch_any(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                cudaStream_t stream) {
  if (!plan.long_rows) {
    with_shape<(kWidth > 1)>(args.columns, [&]<typename Chosen>() {
      launch_rows<T, kWidth, Chosen>(args, partials, plan, stream);
    });
    return;
  }
  // First, as grad_x may be written over an input.
  if (partials.weight != nullptr || partials.bias != nullptr) {
    const auto strips = static_cast<unsigned>(ceil_div(args.columns / kWidth, kWarp));
    launch({strips, static_cast<unsigned>(plan.parts)}, {kWarp, kColumnTeams}, 0, stream, false,
           backward_columns<T, kWidth>, args, partials, plan.rows_per_part);
  }
  launch({static_cast<unsigned>(plan.blocks)}, {kMaxWarps * kWarp}, 0, stream, false,
         backward_long_rows<T, kWidth>, args);
}

// Whether the code that the device runs waits for the work before it by itself: code for 9.0 and
// later does, see add_partials.
bool waits_itself(const void* kernel, int cc_major) {
  constexpr int first_version = 90;
  if (cc_major < first_version / 10) return false;
  cudaFuncAttributes attributes{};
  cuda::check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= first_version;
}

template <typename T>
void launch_sum(const NormBackwardArgs& args, const Partials& partials, const Plan& plan,
                int cc_major, cudaStream_t stream) {
  const bool in_words = plan.wide && !plan.long_rows;
  const int width = in_words ? kAccessBytes / size_of(args.type) : 1;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.columns, kWarp)),
                  args.grad_bias != nullptr ? 2U : 1U);
  launch(grid, {kWarp, kPartTeams}, 0, stream,
         waits_itself(reinterpret_cast<const void*>(add_partials<T>), cc_major), add_partials<T>,
         partials, static_cast<int>(plan.parts), static_cast<int>(args.columns), width,
         static_cast<T*>(args.grad_weight), static_cast<T*>(args.grad_bias));
}

}  // namespace
}  // namespace norm

std::size_t norm_backward_workspace(const NormBackwardArgs& args, int sm_count) {
  const std::size_t tensors =
      (args.grad_weight != nullptr ? 1U : 0U) + (args.grad_bias != nullptr ? 1U : 0U);
  if (tensors == 0) return 0;
  const std::int64_t parts = std::max(norm::make_plan(args, true, sm_count).parts,
                                      norm::make_plan(args, false, sm_count).parts);
  return tensors * static_cast<std::size_t>(parts) * static_cast<std::size_t>(args.columns) *
         sizeof(float);
}

void norm_backward(const NormBackwardArgs& args, void* workspace, int cc_major, int sm_count,
                   cudaStream_t stream) {
  const norm::Plan plan = norm::make_plan(args, norm::is_wide(args), sm_count);
  norm::Partials partials{};
  auto* at = static_cast<float*>(workspace);
  if (args.grad_weight != nullptr) {
    partials.weight = at;
    at += plan.parts * args.columns;
  }
  if (args.grad_bias != nullptr) partials.bias = at;
  if (args.rows > 0) {
    norm::with_type(args.type, [&]<typename T>() {
      if (plan.wide) {
        norm::launch_any<T, norm::kAccessBytes / sizeof(T)>(args, partials, plan, stream);
      } else {
        norm::launch_any<T, 1>(args, partials, plan, stream);
      }
    });
  }
  if (args.grad_weight == nullptr && args.grad_bias == nullptr) return;
  norm::with_type(args.weight_type, [&]<typename T>() {
    norm::launch_sum<T>(args, partials, plan, cc_major, stream);
  });
}

}  // namespace xpuruntime::cuda_raw

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <cstdint>

#include "cuda_raw/norm.h"
#include "cuda_raw/norm_forward_kernels.cuh"
#include "cuda_raw/norm_launch.h"

namespace xpuruntime::cuda_raw {
namespace norm {
namespace {

struct Plan {
  int width = 1;     // elements an access
  int packs = 0;     // accesses a thread; 0: rows too long for registers
  int threads = 32;  // a row
  int teams = 1;     // rows a block
};

// Threads for a row of `packs` when each takes `each` of them, in whole warps.
std::int64_t threads_for(std::int64_t packs, int each) {
  return ceil_div(packs, each * kWarp) * kWarp;
}

Plan make_plan(const NormForwardArgs& args, int sm_count) {
  Plan plan;
  const bool wide = aligned(args.type, args.columns,
                            {{args.x, args.x_row_stride},
                             {args.residual, args.residual_row_stride},
                             {args.y, args.y_row_stride},
                             {args.sum_out, args.sum_row_stride},
                             {args.weight, 0},
                             {args.bias, 0}});
  plan.width = wide ? kAccessBytes / size_of(args.type) : 1;
  const std::int64_t packs = args.columns / plan.width;
  struct Choice {
    int packs;
    int threads;
  };
  constexpr Choice wide_choices[] = {{1, 32}, {2, 32}, {3, 32}, {4, 512}, {8, 1024}};
  constexpr Choice narrow_choices[] = {{4, 512}, {16, 1024}};
  // Few rows cannot fill the device: as many threads for each as there is work for.
  if (wide && args.rows <= std::int64_t{sm_count} * 2 && packs <= 1024) {
    plan.packs = 1;
  } else if (wide) {
    for (const Choice& choice : wide_choices) {
      if (plan.packs == 0 && threads_for(packs, choice.packs) <= choice.threads)
        plan.packs = choice.packs;
    }
  } else {
    for (const Choice& choice : narrow_choices) {
      if (plan.packs == 0 && threads_for(packs, choice.packs) <= choice.threads)
        plan.packs = choice.packs;
    }
  }
  if (plan.packs == 0) {
    plan.threads = kMostWarps * kWarp;
    return plan;
  }
  plan.threads = static_cast<int>(threads_for(packs, plan.packs));
  if (plan.threads == kWarp) plan.teams = 4;
  return plan;
}

template <typename T, int kWidth, int kPacks, int kThreads, int kBlocks, int kBlocksResidual>
void launch_rows(const NormForwardArgs& args, const Plan& plan, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(args.rows, plan.teams));
  const dim3 block(static_cast<unsigned>(plan.threads), static_cast<unsigned>(plan.teams));
  if (args.residual == nullptr) {
    launch({blocks}, block, 0, stream, false,
           forward_rows<T, kWidth, kPacks, kThreads, kBlocks, false>, args);
  } else {
    launch({blocks}, block, 0, stream, false,
           forward_rows<T, kWidth, kPacks, kThreads, kBlocksResidual, true>, args);
  }
}

template <typename T>
void launch_any(const NormForwardArgs& args, const Plan& plan, cudaStream_t stream) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));
  if (plan.packs == 0) {
    launch({static_cast<unsigned>(args.rows)}, {static_cast<unsigned>(plan.threads)}, 0, stream,
           false, plan.width == 1 ? forward_long_rows<T, 1> : forward_long_rows<T, kWidth>, args);
  } else if (plan.width == 1 && plan.packs == 4) {
    launch_rows<T, 1, 4, 1024, 1, 1>(args, plan, stream);
  } else if (plan.width == 1) {
    launch_rows<T, 1, 16, 1024, 1, 1>(args, plan, stream);
  } else if (plan.packs == 1) {
    launch_rows<T, kWidth, 1, 1024, 1, 1>(args, plan, stream);
  } else if (plan.packs == 2) {
    launch_rows<T, kWidth, 2, 128, 8, 8>(args, plan, stream);
  } else if (plan.packs == 3) {
    launch_rows<T, kWidth, 3, 128, 8, 8>(args, plan, stream);
  } else if (plan.packs == 4) {
    launch_rows<T, kWidth, 4, 512, 2, 2>(args, plan, stream);
  } else {
    launch_rows<T, kWidth, 8, 1024, 1, 1>(args, plan, stream);
  }
}

}  // namespace
}  // namespace norm

void norm_forward(const NormForwardArgs& args, int /*cc_major*/, int sm_count,
                  cudaStream_t stream) {
  if (args.rows == 0) return;
  const norm::Plan plan = norm::make_plan(args, sm_count);
  norm::with_type(args.type, [&]<typename T>() { norm::launch_any<T>(args, plan, stream); });
}

}  // namespace xpuruntime::cuda_raw

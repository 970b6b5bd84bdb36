// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstdint>
#include <span>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_forward_kernels.cuh"
#include "cuda_raw/norm/norm_launch.h"

namespace xpuruntime::cuda_raw {
namespace norm {
namespace {

struct Plan {
  bool wide = false;  // accesses of 16 bytes; otherwise of one element
  bool few = false;   // rows, so that they cannot fill the device
  int packs = 0;      // accesses a thread; 0: rows too long for registers
  int threads = 0;    // a row
  int teams = 1;      // rows a block
};

Plan make_plan(const NormForwardArgs& args, int sm_count) {
  struct Choice {
    int packs;
    int most_threads;
  };
  // Few rows: many threads for each. Otherwise whole rows in a warp where they fit, and 4 packs a
  // thread where they do not, so that many blocks run at once and much is under way.
  constexpr Choice few_choices[] = {{1, 512}, {2, 1024}};
  constexpr Choice wide_choices[] = {{1, 32}, {2, 32}, {3, 32}, {4, 512}, {8, 1024}};
  constexpr Choice narrow_choices[] = {{4, 512}, {16, 1024}};
  Plan plan;
  plan.wide = aligned(args.type, args.columns,
                      {{args.x, args.x_row_stride},
                       {args.residual, args.residual_row_stride},
                       {args.y, args.y_row_stride},
                       {args.sum_out, args.sum_row_stride},
                       {args.weight, 0},
                       {args.bias, 0}});
  const std::int64_t packs = args.columns / (plan.wide ? kAccessBytes / size_of(args.type) : 1);
  auto choose = [&](std::span<const Choice> choices) {
    for (const Choice& choice : choices) {
      const std::int64_t threads = ceil_div(packs, choice.packs * kWarp) * kWarp;
      if (threads > choice.most_threads) continue;
      plan.packs = choice.packs;
      plan.threads = static_cast<int>(threads);
      return true;
    }
    return false;
  };
  if (!plan.wide) {
    choose(narrow_choices);
  } else {
    plan.few = args.rows <= std::int64_t{sm_count} * 2 && choose(few_choices);
    if (!plan.few) choose(wide_choices);
  }
  if (plan.packs == 0) plan.threads = kMaxWarps * kWarp;
  if (plan.threads == kWarp && !plan.few) plan.teams = plan.packs == 1 ? 8 : 2;
  return plan;
}

template <typename T, int kWidth, int kPacks, int kThreads, int kBlocks, int kResidualBlocks,
          bool kEarly = false>
void launch_rows(const NormForwardArgs& args, const Plan& plan, cudaStream_t stream) {
  auto* const kernel =
      args.residual == nullptr
          ? forward_rows<T, kWidth, kPacks, kThreads, kBlocks, false, kEarly>
          : forward_rows<T, kWidth, kPacks, kThreads, kResidualBlocks, true, kEarly>;
  launch({static_cast<unsigned>(ceil_div(args.rows, plan.teams))},
         {static_cast<unsigned>(plan.threads), static_cast<unsigned>(plan.teams)}, 0, stream, false,
         kernel, args);
}

template <typename T>
void launch_any(const NormForwardArgs& args, const Plan& plan, cudaStream_t stream) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));
  if (plan.packs == 0) {
    launch({static_cast<unsigned>(args.rows)}, {static_cast<unsigned>(plan.threads)}, 0, stream,
           false, plan.wide ? forward_long_rows<T, kWidth> : forward_long_rows<T, 1>, args);
  } else if (!plan.wide) {
    if (plan.packs == 4) {
      launch_rows<T, 1, 4, 512, 2, 2>(args, plan, stream);
    } else {
      launch_rows<T, 1, 16, 1024, 1, 1>(args, plan, stream);
    }
  } else if (plan.few) {
    if (plan.packs == 1) {
      launch_rows<T, kWidth, 1, 512, 1, 1, true>(args, plan, stream);
    } else {
      launch_rows<T, kWidth, 2, 1024, 1, 1, true>(args, plan, stream);
    }
  } else if (plan.packs == 1) {
    launch_rows<T, kWidth, 1, 256, 8, 6>(args, plan, stream);
  } else if (plan.packs == 2) {
    launch_rows<T, kWidth, 2, 64, 20, 20>(args, plan, stream);
  } else if (plan.packs == 3) {
    launch_rows<T, kWidth, 3, 64, 20, 16>(args, plan, stream);
  } else if (plan.packs == 4) {
    launch_rows<T, kWidth, 4, 512, 3, 2>(args, plan, stream);
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

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cudnn/library.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cudnn {

/// Which plans cuDNN is asked for.
enum class Search : std::uint8_t {
  kQuick,    ///< its quick heuristics, then its list of plans that always work
  kPrecise,  ///< its precise heuristics, then that list
  kAll,      ///< both heuristics and that list
};

/// An operation as a graph of cuDNN, and the plans that cuDNN offers for it, best first by its own
/// order. Plans that the operation rules out (not deterministic, TF32) are never built.
///
/// Building is for one thread at a time; a plan that is built may be executed by one thread at a
/// time (cuDNN does not promise more). Errors: UnsupportedOperationError with cuDNN's own text.
class Graph {
 public:
  /// Slow. The device must be current.
  Graph(const OpDesc& op, Search search, Handle handle);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::size_t plans() const noexcept { return names_.size(); }
  /// "eng4_k2=1_k3=0".
  const std::string& name(std::size_t plan) const { return names_[plan]; }

  /// Slow. Empty when the plan is ready to be executed, else why not.
  std::string build(std::size_t plan);
  /// Of a plan that is built.
  std::size_t workspace_bytes(std::size_t plan) const;
  /// Whether the plan gives the same bits in every run.
  bool repeatable(std::size_t plan);
  /// `operands` as Kernel::launch has them. Throws CudaError.
  void execute(std::size_t plan, Handle handle, void* const* operands, void* workspace) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::vector<std::string> names_;
};

}  // namespace xpuruntime::cudnn

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/graph_kernel.h"

#include <mutex>

#include "cuda/capture.h"
#include "cuda/check.h"
#include "cudnn/handles.h"
#include "cudnn/plan_name.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cudnn {
namespace {

class GraphKernel final : public Kernel {
 public:
  GraphKernel(int device, std::unique_ptr<Graph> graph, std::size_t plan)
      : device_(device),
        graph_(std::move(graph)),
        plan_(plan),
        workspace_(graph_->workspace_bytes(plan)),
        repeatable_(graph_->repeatable(plan)),
        handles_(Handles::of(device)) {}

  std::size_t workspace_bytes() const noexcept override { return workspace_; }
  std::string config() const override { return graph_->name(plan_); }
  bool repeatable() const noexcept override { return repeatable_; }

  void launch(void* const* operands, void* workspace, StreamHandle stream) const override {
    // cuDNN does not promise that one plan may be executed by two threads at once.
    const std::lock_guard lock(mutex_);
    const HandleLease handle = handles_.for_launch();
    Library::get().set_stream(handle.get(), cuda::as_stream(stream), device_);
    graph_->execute(plan_, handle.get(), operands, workspace);
  }

 private:
  const int device_;
  const std::unique_ptr<Graph> graph_;
  const std::size_t plan_;
  const std::size_t workspace_;
  const bool repeatable_;
  Handles& handles_;
  mutable std::mutex mutex_;
};

UnsupportedOperationError none_builds(const OpDesc& op, const std::string& reason) {
  return UnsupportedOperationError(Library::get().name() + " has no plan for " + describe(op) +
                                       (reason.empty() ? "" : ": " + reason),
                                   to_string(op.device));
}

std::unique_ptr<const Kernel> prepare_named(const OpDesc& op, const std::string& config) {
  const HandleLease handle = Handles::of(op.device.index).for_building();
  auto graph = std::make_unique<Graph>(op, Search::kAll, handle.get());
  for (std::size_t plan = 0; plan < graph->plans(); ++plan) {
    if (graph->name(plan) != config) continue;
    const std::string reason = graph->build(plan);
    if (reason.empty()) return make_graph_kernel(op, std::move(graph), plan);
    throw UnsupportedOperationError(Library::get().name() + " cannot build the plan " + config +
                                        " for " + describe(op) + ": " + reason,
                                    to_string(op.device));
  }
  throw UnsupportedOperationError(Library::get().name() + " offers no plan " + config + " for " +
                                      describe(op) +
                                      ": it is of another version, device or operation",
                                  to_string(op.device));
}

}  // namespace

std::unique_ptr<const Kernel> make_graph_kernel(const OpDesc& op, std::unique_ptr<Graph> graph,
                                                std::size_t plan) {
  return std::make_unique<GraphKernel>(op.device.index, std::move(graph), plan);
}

std::unique_ptr<const Kernel> prepare_first(const OpDesc& op, Search search,
                                            const std::string& config) {
  if (!config.empty()) (void)check_plan_name(config);
  const cuda::DeviceGuard guard(op.device.index);
  const cuda::OutsideCapture outside;
  if (!config.empty()) return prepare_named(op, config);
  const HandleLease handle = Handles::of(op.device.index).for_building();
  auto graph = std::make_unique<Graph>(op, search, handle.get());
  std::string first_reason;
  for (std::size_t plan = 0; plan < graph->plans(); ++plan) {
    const std::string reason = graph->build(plan);
    if (reason.empty()) return make_graph_kernel(op, std::move(graph), plan);
    if (first_reason.empty()) first_reason = reason;
  }
  throw none_builds(op, first_reason);
}

std::vector<std::string> plans_that_build(const OpDesc& op, Search search, std::size_t most) {
  const cuda::DeviceGuard guard(op.device.index);
  const cuda::OutsideCapture outside;
  const HandleLease handle = Handles::of(op.device.index).for_building();
  Graph graph(op, search, handle.get());
  std::vector<std::string> names;
  std::string first_reason;
  for (std::size_t plan = 0; plan < graph.plans() && names.size() < most; ++plan) {
    const std::string reason = graph.build(plan);
    if (reason.empty()) {
      names.push_back(graph.name(plan));
    } else if (first_reason.empty()) {
      first_reason = reason;
    }
  }
  if (names.empty() && most > 0) throw none_builds(op, first_reason);
  return names;
}

}  // namespace xpuruntime::cudnn

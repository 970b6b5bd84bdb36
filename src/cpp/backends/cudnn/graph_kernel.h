// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cudnn/graph.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cudnn {

/// The first plan that `search` offers and that builds; or, where `config` is not empty, the plan
/// of that name, wherever cuDNN lists it. Errors as KernelDefinition::prepare.
std::unique_ptr<const Kernel> prepare_first(const OpDesc& op, Search search,
                                            const std::string& config);

/// The names of the first plans that build, at most `most`.
std::vector<std::string> plans_that_build(const OpDesc& op, Search search, std::size_t most);

/// The fastest of all plans by timing each on the device, with memory of its own. Takes seconds,
/// and waits for its own work only. Throws OutOfMemoryError as well.
std::unique_ptr<const Kernel> prepare_fastest(const OpDesc& op);

/// The kernel of a plan that is built.
std::unique_ptr<const Kernel> make_graph_kernel(const OpDesc& op, std::unique_ptr<Graph> graph,
                                                std::size_t plan);

}  // namespace xpuruntime::cudnn

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace xpuruntime::bindings {

/// What stands for the path of a module, as xpuruntime.pytorch.call_scope.module_paths names it.
using ModuleNumber = std::uint32_t;
/// Of no module, or of one that is not known.
constexpr ModuleNumber kNoModule = 0;
/// Python has to be asked.
constexpr ModuleNumber kUntoldModule = 0xFFFF'FFFF;

/// The forward of a module begins in this thread: of `object`, inside of the Python function that
/// called the one that calls this, and it has ended when that function has. With the GIL.
void enter_module(const pybind11::str& path, pybind11::handle object);
/// It ends. With the GIL.
void leave_module(pybind11::handle object);
/// Those that run in this thread, each inside of the one before it.
std::size_t running_modules() noexcept;
/// The path of the innermost one that runs in this thread, or None. With the GIL.
pybind11::object running_module();
/// The same, for a hook that is called before `enter_module`.
pybind11::object outer_module();

/// The module that the call that runs in this thread belongs to: the stated one, else in a forward
/// the innermost one that runs, in a backward the one in whose forward the node of autograd that
/// runs was made. kUntoldModule without the addon. Needs no GIL.
ModuleNumber call_module() noexcept;
/// As call_module, also without the addon. `recorded`: whether gradients are, where PyTorch does
/// not say it. With the GIL.
pybind11::object call_module_path(std::optional<bool> recorded);
/// Of a number that call_module has returned. With the GIL.
pybind11::object module_path(ModuleNumber module);

/// What compiled code computes: a forward that has a backward, which is compiled, too; that
/// backward; or a forward alone.
enum class CompiledGraph : std::uint8_t { kForward, kBackward, kInference };
/// The graph of such a word: "forward", "backward"; any other is kInference.
CompiledGraph graph_of(std::string_view name) noexcept;

/// A module of compiled code, by its path from the one whose compiled code runs. That is the
/// innermost one that runs, or in a backward the one whose forward that is of. With the GIL.
ModuleNumber compiled_module(const pybind11::str& path, CompiledGraph graph);

}  // namespace xpuruntime::bindings

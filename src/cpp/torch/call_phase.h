// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace xpuruntime::bindings {

/// What the call that runs in a thread is part of, as xpuruntime.pytorch.dispatch.context.phase
/// says it.
enum class CallPhase : std::uint8_t { kUnknown, kTrain, kBackward, kInfer, kPrefill, kDecode };

/// The stated phase, else what the addon reports; unknown without one. Needs no GIL.
CallPhase call_phase() noexcept;
/// As call_phase, also without the addon. With the GIL.
CallPhase call_phase_with_gil();

/// Whether this thread runs a backward pass; false without the addon. Needs no GIL.
bool runs_backward() noexcept;
/// Which one, as torch._C._current_graph_task_id says it, or -1. As above.
std::int64_t running_backward() noexcept;
/// As running_backward, also without the addon. With the GIL.
std::int64_t running_backward_with_gil();
/// Whether PyTorch records gradients in this thread. With the GIL.
bool records_gradients();

/// The forward of a torch.autograd.Function begins in this thread, in which PyTorch records no
/// gradients: what it calls is of the phase `phase`, where nothing else says so. `backward`: the
/// one that runs, or -1. Forwards nest.
void enter_function(CallPhase phase, std::int64_t backward);
/// It ends.
void leave_function() noexcept;
/// The phase of the innermost one that the code of this thread is part of; kUnknown where it is
/// part of none, as in a backward that has begun in it. `backward`: the backward that runs, or -1.
CallPhase function_phase(std::int64_t backward) noexcept;

/// What inference in this thread is from now on: kPrefill or kDecode inside the forward of a model
/// that keeps a cache of keys and values, else kUnknown. Returns what it was.
CallPhase set_generation_phase(CallPhase phase) noexcept;

/// The word that policies have for a phase; empty for kUnknown.
std::string_view phase_name(CallPhase phase) noexcept;
/// The same for Python, borrowed. With the GIL.
PyObject* phase_text(CallPhase phase);
/// The phase of such a word; throws std::invalid_argument for another one.
CallPhase phase_of(std::string_view name);

}  // namespace xpuruntime::bindings

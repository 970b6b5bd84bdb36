// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace xpuruntime::bindings {

/// What the call that runs in a thread is part of, as xpuruntime.pytorch.calls.phase says it.
enum class CallPhase : std::uint8_t { kUnknown, kTrain, kBackward, kInfer };

/// Finds PyTorch's functions that tell. Returns what is against using them, or nothing. With the
/// GIL.
std::string open_phases();

/// The stated phase, else what PyTorch's functions tell; unknown before open_phases. Needs no GIL.
CallPhase call_phase() noexcept;

/// Whether this thread runs a backward pass; false before open_phases. Needs no GIL.
bool runs_backward() noexcept;

/// The word that policies have for a phase; empty for kUnknown.
std::string_view phase_name(CallPhase phase) noexcept;
/// The phase of such a word; throws std::invalid_argument for another one.
CallPhase phase_of(std::string_view name);

}  // namespace xpuruntime::bindings

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "call_module.h"
#include "call_phase.h"

namespace xpuruntime::bindings {

/// What a call is part of, as it was known when its code was compiled.
struct AnnotatedCall {
  CallPhase phase = CallPhase::kUnknown;  // as PyTorch's functions tell
  ModuleNumber module = kNoModule;        // as call_module finds it
};

/// Calls of this thread are part of this, until leave_call; calls nest.
void enter_call(AnnotatedCall call);
void leave_call() noexcept;
/// The innermost one that this thread is in; nothing is stated outside of all. Needs no GIL.
AnnotatedCall annotated_call() noexcept;

}  // namespace xpuruntime::bindings

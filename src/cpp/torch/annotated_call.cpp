// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "annotated_call.h"

#include <vector>

namespace xpuruntime::bindings {
namespace {

thread_local std::vector<AnnotatedCall> calls;

}  // namespace

void enter_call(AnnotatedCall call) { calls.push_back(call); }

void leave_call() noexcept {
  if (!calls.empty()) calls.pop_back();
}

AnnotatedCall annotated_call() noexcept { return calls.empty() ? AnnotatedCall{} : calls.back(); }

}  // namespace xpuruntime::bindings

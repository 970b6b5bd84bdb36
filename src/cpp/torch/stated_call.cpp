// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "stated_call.h"

#include <vector>

namespace xpuruntime::bindings {
namespace {

thread_local std::vector<StatedCall> calls;

}  // namespace

void enter_call(StatedCall call) { calls.push_back(call); }

void leave_call() noexcept {
  if (!calls.empty()) calls.pop_back();
}

StatedCall stated_call() noexcept { return calls.empty() ? StatedCall{} : calls.back(); }

}  // namespace xpuruntime::bindings

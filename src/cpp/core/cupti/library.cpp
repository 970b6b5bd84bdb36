// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cupti/library.h"

#include <cuda_runtime_api.h>

namespace xpuruntime::activity {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;

}  // namespace

const Library& Library::get() {
  static const Library found;
  return found;
}

Library::Library() {
  const std::string major = std::to_string(kMajor);
  library = SharedLibrary::open(
      {"libcupti.so." + major},
      "install the package " +
          std::string(kMajor >= 13 ? "nvidia-cuda-cupti" : "nvidia-cuda-cupti-cu12") +
          " (part of the extra xpuruntime[cuda])");
#define XPURUNTIME_FIND(member, name) member = library.get<decltype(member)>(name)
  XPURUNTIME_FIND(subscribe, "cuptiSubscribe");
  XPURUNTIME_FIND(unsubscribe, "cuptiUnsubscribe");
  XPURUNTIME_FIND(enable_domain, "cuptiEnableDomain");
  XPURUNTIME_FIND(finalize, "cuptiFinalize");
  XPURUNTIME_FIND(register_callbacks, "cuptiActivityRegisterCallbacks");
  XPURUNTIME_FIND(register_clock, "cuptiActivityRegisterTimestampCallback");
  XPURUNTIME_FIND(enable, "cuptiActivityEnable");
  XPURUNTIME_FIND(disable, "cuptiActivityDisable");
  XPURUNTIME_FIND(flush, "cuptiActivityFlushAll");
  XPURUNTIME_FIND(next_record, "cuptiActivityGetNextRecord");
  XPURUNTIME_FIND(dropped_records, "cuptiActivityGetNumDroppedRecords");
  XPURUNTIME_FIND(push_id, "cuptiActivityPushExternalCorrelationId");
  XPURUNTIME_FIND(pop_id, "cuptiActivityPopExternalCorrelationId");
  XPURUNTIME_FIND(callback_name, "cuptiGetCallbackName");
  XPURUNTIME_FIND(result_string, "cuptiGetResultString");
#undef XPURUNTIME_FIND
}

std::string Library::describe(CUptiResult status) const {
  const char* text = nullptr;
  if (result_string(status, &text) != CUPTI_SUCCESS || text == nullptr) text = "unknown error";
  return std::string(text) + " (" + std::to_string(static_cast<int>(status)) + ", " +
         library.path() + ")";
}

}  // namespace xpuruntime::activity

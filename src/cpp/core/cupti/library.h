// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cupti.h>

#include <string>

#include "xpuruntime/shared_library.h"

namespace xpuruntime::activity {

/// libcupti of the CUDA release that this was built with, opened on first use and never closed.
struct Library {
  /// Throws UnsupportedOperationError when it cannot be opened, saying where it was looked for and
  /// what to install. After a failure the next call tries again.
  static const Library& get();

  /// "CUPTI_ERROR_NOT_INITIALIZED: ...".
  std::string describe(CUptiResult status) const;

  SharedLibrary library;
  decltype(&cuptiSubscribe) subscribe;
  decltype(&cuptiUnsubscribe) unsubscribe;
  decltype(&cuptiEnableDomain) enable_domain;
  decltype(&cuptiFinalize) finalize;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityRegisterTimestampCallback) register_clock;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityGetNumDroppedRecords) dropped_records;
  decltype(&cuptiActivityPushExternalCorrelationId) push_id;
  decltype(&cuptiActivityPopExternalCorrelationId) pop_id;
  decltype(&cuptiGetCallbackName) callback_name;
  decltype(&cuptiGetResultString) result_string;

 private:
  Library();
};

}  // namespace xpuruntime::activity

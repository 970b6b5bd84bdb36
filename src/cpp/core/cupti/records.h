// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cupti.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cupti/library.h"
#include "tracing/device_activity.h"

namespace xpuruntime::activity {

/// Reads CUPTI's buffers into activity records, up to a limit. Thread-safe.
class Records {
 public:
  Records(const Library& library, std::size_t limit) : library_(library), limit_(limit) {}

  /// Takes all records of a buffer.
  void read(std::uint8_t* buffer, std::size_t bytes);
  void lose(std::size_t count);
  /// Joins work to ranges and hands everything over.
  Collected take();

 private:
  void read(const CUpti_Activity* record);
  void add(WorkRecord record);
  void add(const CUpti_ActivityAPI& call);
  SharedName name_of(std::string_view text);
  /// Null for calls that give a device no work and wait for none.
  SharedName call_name(CUpti_CallbackDomain domain, CUpti_CallbackId id);

  const Library& library_;
  const std::size_t limit_;
  std::mutex mutex_;
  Collected kept_;
  std::unordered_map<std::string, SharedName> names_;
  std::map<std::pair<CUpti_CallbackDomain, CUpti_CallbackId>, SharedName> calls_;
  std::unordered_map<std::uint32_t, std::uint64_t> ranges_;   // of correlation numbers
  std::unordered_map<std::uint32_t, std::uint32_t> devices_;  // of contexts
};

}  // namespace xpuruntime::activity

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cupti/records.h"

#include <cxxabi.h>

#include <array>
#include <cstdlib>
#include <memory>

namespace xpuruntime::activity {
namespace {

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 && text != nullptr ? text.get() : name;
}

std::string_view memory_kind(unsigned kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE:
      return "host (pageable)";
    case CUPTI_ACTIVITY_MEMORY_KIND_PINNED:
      return "host (pinned)";
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE:
    case CUPTI_ACTIVITY_MEMORY_KIND_DEVICE_STATIC:
      return "device";
    case CUPTI_ACTIVITY_MEMORY_KIND_ARRAY:
      return "array";
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED:
    case CUPTI_ACTIVITY_MEMORY_KIND_MANAGED_STATIC:
      return "managed";
    default:
      return "";
  }
}

std::string_view wait_name(CUpti_ActivitySynchronizationType type) {
  switch (type) {
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE:
      return "the host waits for an event";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT:
      return "a stream waits for an event";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE:
      return "the host waits for a stream";
    case CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE:
      return "the host waits for a device";
    default:
      return "wait";
  }
}

bool matters(std::string_view call) {
  constexpr std::array<std::string_view, 12> kWords{
      "Launch", "Memcpy",    "Memset",      "Malloc",    "MemAlloc", "MemFree",
      "Free",   "MemCreate", "Synchronize", "WaitEvent", "MemMap",   "MemUnmap"};
  for (const std::string_view word : kWords) {
    if (call.find(word) != std::string_view::npos) return true;
  }
  return false;
}

template <typename Record>
WorkRecord work_of(const Record& from, WorkKind kind) {
  WorkRecord work;
  work.kind = kind;
  work.start_ns = static_cast<std::int64_t>(from.start);
  work.end_ns = static_cast<std::int64_t>(from.end);
  work.correlation = from.correlationId;
  work.stream = from.streamId;
  return work;
}

template <typename Record>
WorkRecord device_work_of(const Record& from, WorkKind kind) {
  WorkRecord work = work_of(from, kind);
  work.device = static_cast<int>(from.deviceId);
  work.graph = from.graphId;
  return work;
}

template <typename Record>
const Record& as(const CUpti_Activity* record) {
  return *reinterpret_cast<const Record*>(record);
}

}  // namespace

void Records::read(std::uint8_t* buffer, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  CUpti_Activity* record = nullptr;
  while (library_.next_record(buffer, bytes, &record) == CUPTI_SUCCESS) read(record);
}

void Records::lose(std::size_t count) {
  const std::lock_guard lock(mutex_);
  kept_.dropped += count;
}

void Records::read(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& from = as<CUpti_ActivityKernel10>(record);
      WorkRecord work = device_work_of(from, WorkKind::kKernel);
      work.name = name_of(from.name == nullptr ? "?" : from.name);
      devices_.emplace(from.contextId, from.deviceId);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& from = as<CUpti_ActivityMemcpy6>(record);
      WorkRecord work = device_work_of(from, WorkKind::kCopy);
      work.name = name_of("copy");
      work.bytes = from.bytes;
      work.source = memory_kind(from.srcKind);
      work.destination = memory_kind(from.dstKind);
      devices_.emplace(from.contextId, from.deviceId);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto& from = as<CUpti_ActivityMemcpyPtoP4>(record);
      WorkRecord work = device_work_of(from, WorkKind::kCopy);
      work.name = name_of("copy from device " + std::to_string(from.srcDeviceId) + " to device " +
                          std::to_string(from.dstDeviceId));
      work.bytes = from.bytes;
      work.source = memory_kind(from.srcKind);
      work.destination = memory_kind(from.dstKind);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto& from = as<CUpti_ActivityMemset4>(record);
      WorkRecord work = device_work_of(from, WorkKind::kFill);
      work.name = name_of("fill");
      work.bytes = from.bytes;
      work.destination = memory_kind(from.memoryKind);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: {
      const auto& from = as<CUpti_ActivitySynchronization2>(record);
      WorkRecord work = work_of(from, WorkKind::kWait);
      work.name = name_of(wait_name(from.type));
      const auto device = devices_.find(from.contextId);
      work.device = device == devices_.end() ? 0 : static_cast<int>(device->second);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_MEMORY2: {
      const auto& from = as<CUpti_ActivityMemory4>(record);
      const bool taken =
          from.memoryOperationType == CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_ALLOCATION;
      WorkRecord work;
      work.kind = taken ? WorkKind::kAllocation : WorkKind::kRelease;
      work.name = name_of(taken ? "allocation" : "release");
      work.start_ns = work.end_ns = static_cast<std::int64_t>(from.timestamp);
      work.correlation = from.correlationId;
      work.device = static_cast<int>(from.deviceId);
      work.stream = from.streamId;
      work.bytes = from.bytes;
      work.destination = memory_kind(from.memoryKind);
      return add(std::move(work));
    }
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto& from = as<CUpti_ActivityExternalCorrelation>(record);
      if (from.externalKind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0 &&
          ranges_.size() < 4 * limit_) {
        ranges_.insert_or_assign(from.correlationId, from.externalId);
      }
      return;
    }
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER:
      return add(as<CUpti_ActivityAPI>(record));
    default:
      return;
  }
}

void Records::add(WorkRecord record) {
  if (kept_.work.size() < limit_) {
    kept_.work.push_back(std::move(record));
  } else {
    ++kept_.dropped;
  }
}

void Records::add(const CUpti_ActivityAPI& call) {
  const auto domain = call.kind == CUPTI_ACTIVITY_KIND_RUNTIME ? CUPTI_CB_DOMAIN_RUNTIME_API
                                                               : CUPTI_CB_DOMAIN_DRIVER_API;
  SharedName name = call_name(domain, call.cbid);
  if (name == nullptr) return;
  if (kept_.calls.size() >= limit_) {
    ++kept_.dropped;
    return;
  }
  kept_.calls.push_back({.name = std::move(name),
                         .thread = call.threadId,
                         .start_ns = static_cast<std::int64_t>(call.start),
                         .end_ns = static_cast<std::int64_t>(call.end),
                         .correlation = call.correlationId});
}

SharedName Records::name_of(std::string_view text) {
  SharedName& name = names_[std::string(text)];
  if (name == nullptr)
    name = std::make_shared<const std::string>(demangled(std::string(text).c_str()));
  return name;
}

SharedName Records::call_name(CUpti_CallbackDomain domain, CUpti_CallbackId id) {
  const auto [found, fresh] = calls_.try_emplace({domain, id});
  if (fresh) {
    const char* text = nullptr;
    if (library_.callback_name(domain, id, &text) == CUPTI_SUCCESS && text != nullptr) {
      std::string_view name = text;  // "cudaLaunchKernel_v7000"
      name = name.substr(0, name.rfind("_v"));
      if (matters(name)) found->second = std::make_shared<const std::string>(name);
    }
  }
  return found->second;
}

Collected Records::take() {
  const std::lock_guard lock(mutex_);
  for (WorkRecord& work : kept_.work) {
    const auto range = ranges_.find(work.correlation);
    if (work.correlation != 0 && range != ranges_.end()) work.range = range->second;
  }
  return std::exchange(kept_, {});
}

}  // namespace xpuruntime::activity

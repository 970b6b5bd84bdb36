// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/memory_resource.h"

namespace xpuruntime::testing {

/// Streams without a device: a vector clock says what each stream has waited for, so that a test
/// can decide whether memory may be used again.
class FakeOrder final : public StreamOrder {
 public:
  using Clock = std::map<StreamHandle, std::uint64_t>;

  /// Puts one piece of work on a stream and returns its time there.
  std::uint64_t work(StreamHandle stream) { return ++clocks_[stream][stream]; }
  /// All work given to the stream so far is done.
  void complete(StreamHandle stream) {
    for (const auto& [other, time] : clocks_[stream]) raise(done_[other], time);
  }
  bool done(StreamHandle stream, std::uint64_t time) { return done_[stream] >= time; }
  /// Whether new work on `stream` comes after that work.
  bool after(StreamHandle stream, StreamHandle other, std::uint64_t time) {
    return clocks_[stream][other] >= time || done(other, time);
  }

  Event record(StreamHandle stream) noexcept override {
    if (refuse_marks || destroyed[stream]) return 0;
    marks_[++last_] = clocks_[stream];
    ++records;
    return last_;
  }
  bool finished(Event event) noexcept override {
    const Clock& mark = marks_.at(event);
    return std::all_of(mark.begin(), mark.end(),
                       [this](const auto& entry) { return done(entry.first, entry.second); });
  }
  bool wait(StreamHandle stream, Event event) noexcept override {
    for (const auto& [other, time] : marks_.at(event)) raise(clocks_[stream][other], time);
    ++waits;
    return true;
  }
  bool synchronize(Event event) noexcept override {
    for (const auto& [other, time] : marks_.at(event)) raise(done_[other], time);
    ++synchronizations;
    return true;
  }
  bool synchronize_all() noexcept override {
    if (refuse_marks) return false;
    for (const auto& [stream, clock] : clocks_) {
      for (const auto& [other, time] : clock) raise(done_[other], time);
    }
    return true;
  }
  void destroy(Event event) noexcept override { marks_.erase(event); }

  std::size_t live_marks() const { return marks_.size(); }

  bool refuse_marks = false;
  std::map<StreamHandle, bool> destroyed;
  int records = 0;
  int waits = 0;
  int synchronizations = 0;

 private:
  static void raise(std::uint64_t& value, std::uint64_t to) { value = std::max(value, to); }

  std::map<StreamHandle, Clock> clocks_;
  Clock done_;
  std::map<Event, Clock> marks_;
  Event last_ = 0;
};

/// What a FakeResource did. It outlives the pool, so that a test can look afterwards.
struct Ledger {
  std::mutex mutex;
  std::unordered_map<void*, std::size_t> live;
  std::size_t bytes = 0;
  std::size_t calls = 0;
  std::size_t capacity = SIZE_MAX;  ///< more than this is exhausted memory
  std::size_t fail_at = 0;          ///< this call (from 1) returns nullptr; 0 for none
  std::size_t throw_at = 0;         ///< this call throws CudaError
  FakeOrder* order = nullptr;
  bool host = true;
  std::function<void(void*, std::size_t)> on_free;  ///< a real device is idle then
  std::function<void()> before_allocate;            ///< without the mutex, so that it may block
  std::function<void()> before_free;
};

class FakeResource final : public MemoryResource {
 public:
  explicit FakeResource(Ledger& ledger) : ledger_(ledger) {}
  DeviceId device() const noexcept override {
    return {ledger_.order == nullptr ? DeviceType::kCpu : DeviceType::kCuda, 0};
  }
  bool host_accessible() const noexcept override { return ledger_.host; }
  StreamOrder* order() noexcept override { return ledger_.order; }
  MemoryInfo memory_info() noexcept override { return {}; }

  void* allocate(std::size_t bytes, StreamHandle /*stream*/) override {
    if (ledger_.before_allocate) ledger_.before_allocate();
    const std::lock_guard lock(ledger_.mutex);
    ++ledger_.calls;
    if (ledger_.calls == ledger_.throw_at) throw CudaError("injected", "cuda:0", 700);
    if (ledger_.calls == ledger_.fail_at) return nullptr;
    if (bytes > ledger_.capacity || ledger_.bytes > ledger_.capacity - bytes) return nullptr;
    void* const pointer = ::operator new(bytes, std::align_val_t{256}, std::nothrow);
    if (pointer == nullptr) return nullptr;
    ledger_.live.emplace(pointer, bytes);
    ledger_.bytes += bytes;
    return pointer;
  }

  void deallocate(void* pointer, std::size_t bytes, StreamHandle /*stream*/) noexcept override {
    if (ledger_.before_free) ledger_.before_free();
    const std::lock_guard lock(ledger_.mutex);
    const auto found = ledger_.live.find(pointer);
    if (found == ledger_.live.end() || found->second != bytes) {
      ++wrong_frees;
      return;
    }
    if (ledger_.on_free) ledger_.on_free(pointer, bytes);
    ledger_.live.erase(found);
    ledger_.bytes -= bytes;
    ::operator delete(pointer, std::align_val_t{256});
  }

  static inline int wrong_frees = 0;

 private:
  Ledger& ledger_;
};

inline std::unique_ptr<MemoryResource> fake(Ledger& ledger) {
  return std::make_unique<FakeResource>(ledger);
}

inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;

}  // namespace xpuruntime::testing

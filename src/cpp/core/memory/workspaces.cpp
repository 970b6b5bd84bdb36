// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/workspaces.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams/graph_blocks.h"
#include "streams/stream_calls.h"
#include "streams/stream_handle.h"
#include "xpuruntime/buffer.h"
#include "xpuruntime/memory_manager.h"

namespace xpuruntime {
namespace {

// The scratch memory of one stream, or of one thread on the CPU.
struct Slot {
  std::mutex mutex;
  std::atomic<std::size_t> held{0};  // of `buffer`, to be read without the lock
  Buffer buffer;
  // Of the newest capture from the stream; held by its graph.
  std::uint64_t capture = 0;
  GraphBlocks::View captured;

  void replace(Buffer with) noexcept {
    held.store(with.size(), std::memory_order_relaxed);
    buffer = std::move(with);
  }
};

struct StreamKey {
  int device = 0;
  StreamHandle stream = 0;
  friend bool operator==(const StreamKey&, const StreamKey&) = default;
};

struct StreamKeyHash {
  std::size_t operator()(const StreamKey& key) const noexcept {
    return std::hash<StreamHandle>{}(key.stream ^ (static_cast<StreamHandle>(key.device) << 48U));
  }
};

// What a thread has on the CPU, by the number of the Workspaces; goes with the thread.
struct ThreadSlots {
  std::vector<std::pair<std::uint64_t, std::shared_ptr<Slot>>> slots;
};

ThreadSlots& of_this_thread() {
  thread_local ThreadSlots slots;
  return slots;
}

}  // namespace

struct Workspaces::State {
  explicit State(MemoryManager& from) : memory(from) {
    static std::atomic<std::uint64_t> made{0};
    number = made.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  std::shared_ptr<Slot> slot(DeviceId device, StreamHandle stream);
  std::vector<std::shared_ptr<Slot>> slots() const;

  MemoryManager& memory;
  std::uint64_t number = 0;
  mutable std::mutex mutex;
  std::unordered_map<StreamKey, std::shared_ptr<Slot>, StreamKeyHash> streams;
  std::vector<std::weak_ptr<Slot>> threads;
};

std::shared_ptr<Slot> Workspaces::State::slot(DeviceId device, StreamHandle stream) {
  if (device.type == DeviceType::kCpu) {
    auto& mine = of_this_thread().slots;
    const auto found = std::find_if(mine.begin(), mine.end(),
                                    [&](const auto& one) { return one.first == number; });
    if (found != mine.end()) return found->second;
    auto made = std::make_shared<Slot>();
    mine.emplace_back(number, made);
    const std::lock_guard lock(mutex);
    std::erase_if(threads, [](const auto& weak) { return weak.expired(); });
    threads.push_back(made);
    return made;
  }
  const std::lock_guard lock(mutex);
  std::shared_ptr<Slot>& found = streams[{device.index, stream}];
  if (found == nullptr) found = std::make_shared<Slot>();
  return found;
}

std::vector<std::shared_ptr<Slot>> Workspaces::State::slots() const {
  std::vector<std::shared_ptr<Slot>> all;
  const std::lock_guard lock(mutex);
  all.reserve(streams.size() + threads.size());
  for (const auto& [key, slot] : streams) all.push_back(slot);
  for (const auto& weak : threads) {
    if (std::shared_ptr<Slot> slot = weak.lock()) all.push_back(std::move(slot));
  }
  return all;
}

Workspaces::Workspaces(MemoryManager& memory) : state_(std::make_shared<State>(memory)) {}

Workspaces::~Workspaces() { clear(); }

Workspaces::Lease Workspaces::get(DeviceId device, StreamHandle stream, std::size_t bytes) {
  Lease lease;
  if (bytes == 0) return lease;
  const bool cuda = device.type == DeviceType::kCuda;
  const StreamHandle handle = cuda ? checked_stream(stream) : 0;
  const std::optional<calls::Capture> capture =
      cuda ? calls::capture_of(device.index, handle) : std::nullopt;
  std::shared_ptr<Slot> slot = state_->slot(device, handle);
  std::unique_lock lock(slot->mutex);
  if (capture) {
    if (slot->capture != capture->id || slot->captured.bytes < bytes) {
      slot->captured = GraphBlocks::instance().give(state_->memory, device, *capture, bytes);
      slot->capture = capture->id;
    }
    lease.data_ = slot->captured.data;
  } else {
    if (slot->buffer.size() < bytes || !slot->buffer) {
      if (cuda) GraphBlocks::instance().release_idle();
      slot->replace(state_->memory.default_pool(device)->allocate(bytes, handle));
    }
    lease.data_ = slot->buffer.data();
  }
  lease.lock_ = std::move(lock);
  lease.slot_ = std::move(slot);
  return lease;
}

void Workspaces::retire_stream(DeviceId device, StreamHandle stream) noexcept {
  if (device.type != DeviceType::kCuda) return;
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->streams.find({device.index, stream});
    if (found == state_->streams.end()) return;
    slot = std::move(found->second);
    state_->streams.erase(found);
  }
  const std::lock_guard lock(slot->mutex);
  slot->replace({});
}

std::size_t Workspaces::bytes() const {
  std::size_t sum = GraphBlocks::instance().bytes();
  for (const auto& slot : state_->slots()) sum += slot->held.load(std::memory_order_relaxed);
  return sum;
}

void Workspaces::clear() {
  for (const auto& slot : state_->slots()) {
    const std::unique_lock lock(slot->mutex, std::try_to_lock);
    if (lock.owns_lock()) slot->replace({});
  }
  GraphBlocks::instance().release_idle();
}

}  // namespace xpuruntime

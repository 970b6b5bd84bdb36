// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/handles.h"

#include <atomic>
#include <memory>
#include <unordered_map>

namespace xpuruntime::cudnn {

Handles::Handles(int device) {
  const Library& library = Library::get();
  for (Slot& slot : launching_) slot.handle = library.create_handle(device);
  building_.handle = library.create_handle(device);
}

Handles& Handles::of(int device) {
  struct All {
    std::mutex mutex;
    std::unordered_map<int, std::unique_ptr<Handles>> by_device;
  };
  static All* const all = new All;
  const std::lock_guard lock(all->mutex);
  std::unique_ptr<Handles>& handles = all->by_device[device];
  if (handles == nullptr) handles.reset(new Handles(device));
  return *handles;
}

HandleLease Handles::for_launch() noexcept {
  static std::atomic<std::size_t> threads{0};
  thread_local const std::size_t home = threads.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t i = 0; i < kForLaunches; ++i) {
    Slot& slot = launching_[(home + i) % kForLaunches];
    std::unique_lock lock(slot.mutex, std::try_to_lock);
    if (lock.owns_lock()) return {slot.handle, std::move(lock)};
  }
  Slot& slot = launching_[home % kForLaunches];
  return {slot.handle, std::unique_lock(slot.mutex)};
}

HandleLease Handles::for_building() noexcept {
  return {building_.handle, std::unique_lock(building_.mutex)};
}

}  // namespace xpuruntime::cudnn

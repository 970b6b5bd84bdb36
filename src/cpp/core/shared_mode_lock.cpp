// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "shared_mode_lock.h"

#include <utility>

namespace xpuruntime {

SharedModeLock::SharedModeLock(Change came, Change gone)
    : came_(std::move(came)), gone_(std::move(gone)), queue_(std::make_unique<Queue>()) {}

void SharedModeLock::go_in(Mode mode) {
  if (inside_++ > 0) return;
  mode_ = mode;
  came_(mode);
}

void SharedModeLock::go_out() {
  if (--inside_ == 0) gone_(mode_);
}

bool SharedModeLock::try_enter(Mode mode) {
  const std::scoped_lock lock(queue_->mutex);
  if (queue_->next != queue_->drawn || !fits(mode)) return false;
  go_in(mode);
  return true;
}

void SharedModeLock::enter(Mode mode) {
  std::unique_lock lock(queue_->mutex);
  const std::uint64_t ticket = queue_->drawn++;
  queue_->changed.wait(lock, [&] { return queue_->next == ticket && fits(mode); });
  ++queue_->next;
  go_in(mode);
  if (queue_->next != queue_->drawn) queue_->changed.notify_all();  // who is next may fit
}

void SharedModeLock::leave() {
  const std::scoped_lock lock(queue_->mutex);
  go_out();
  if (inside_ == 0 && queue_->next != queue_->drawn) queue_->changed.notify_all();
}

void SharedModeLock::before_fork() { queue_->mutex.lock(); }

void SharedModeLock::after_fork() { queue_->mutex.unlock(); }

void SharedModeLock::after_fork_in_child(bool inside) {
  queue_->mutex.unlock();
  given_up_.push_back(std::exchange(queue_, std::make_unique<Queue>()));
  if (inside_ == 0) return;
  inside_ = 1;
  if (!inside) go_out();
}

}  // namespace xpuruntime

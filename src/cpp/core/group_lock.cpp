// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "group_lock.h"

#include <utility>

namespace xpuruntime {

GroupLock::GroupLock(Change came, Change gone)
    : came_(std::move(came)), gone_(std::move(gone)), queue_(std::make_unique<Queue>()) {}

void GroupLock::go_in(Group group) {
  if (inside_++ > 0) return;
  group_ = group;
  came_(group);
}

void GroupLock::go_out() {
  if (--inside_ == 0) gone_(group_);
}

bool GroupLock::try_enter(Group group) {
  const std::scoped_lock lock(queue_->mutex);
  if (queue_->next != queue_->drawn || !fits(group)) return false;
  go_in(group);
  return true;
}

void GroupLock::enter(Group group) {
  std::unique_lock lock(queue_->mutex);
  const std::uint64_t ticket = queue_->drawn++;
  queue_->changed.wait(lock, [&] { return queue_->next == ticket && fits(group); });
  ++queue_->next;
  go_in(group);
  if (queue_->next != queue_->drawn) queue_->changed.notify_all();  // who is next may fit
}

void GroupLock::leave() {
  const std::scoped_lock lock(queue_->mutex);
  go_out();
  if (inside_ == 0 && queue_->next != queue_->drawn) queue_->changed.notify_all();
}

void GroupLock::before_fork() { queue_->mutex.lock(); }

void GroupLock::after_fork() { queue_->mutex.unlock(); }

void GroupLock::after_fork_in_child(bool inside) {
  queue_->mutex.unlock();
  given_up_.push_back(std::exchange(queue_, std::make_unique<Queue>()));
  if (inside_ == 0) return;
  inside_ = 1;
  if (!inside) go_out();
}

}  // namespace xpuruntime

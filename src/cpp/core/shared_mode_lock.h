// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace xpuruntime {

/// Lets any number of threads in that want the same, while those that want something else wait.
/// First come, first served: once one waits, nobody overtakes it.
class SharedModeLock {
 public:
  using Mode = std::uint64_t;
  using Change = std::function<void(Mode)>;

  /// `came`: called before the first of a mode is in. `gone`: after the last of it is out, and
  /// before anybody else comes in. Neither may throw, wait, or use this lock.
  SharedModeLock(Change came, Change gone);

  /// Goes in if nobody has to be waited for.
  bool try_enter(Mode mode);
  void enter(Mode mode);
  void leave();

  /// Around a fork: nobody goes in or out meanwhile. In the child, in which the thread that called
  /// fork is alone, all others have left. `inside`: whether this one is in.
  void before_fork();
  void after_fork();
  void after_fork_in_child(bool inside);

 private:
  // What is anew in a child.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t drawn = 0;  // tickets
    std::uint64_t next = 0;   // who goes in next
  };

  bool fits(Mode mode) const noexcept { return inside_ == 0 || mode_ == mode; }
  void go_in(Mode mode);
  void go_out();

  Change came_;
  Change gone_;
  std::unique_ptr<Queue> queue_;
  std::vector<std::unique_ptr<Queue>> given_up_;  // in which threads waited at a fork
  std::size_t inside_ = 0;
  Mode mode_ = 0;
};

}  // namespace xpuruntime

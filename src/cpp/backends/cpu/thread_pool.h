// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace xpuruntime::cpu {

// The threads that kernels of the backend `cpu` share.
//
// A call is cut into tasks by its shape and `thread_count` alone, and a task is done by one thread
// from beginning to end, so results do not depend on which thread does what. The threads serve one
// call at a time; a call that comes meanwhile, or from inside a task, does all its tasks on its own
// thread. So there are never more threads at work than callers plus `thread_count` - 1, and nothing
// waits for anything but its own tasks.
//
// The threads start with the first call that has more than one task, look out for the next one for
// 0.2 ms and then sleep, take no signals, and are never joined: the process may exit at any time. A
// child made by fork starts its own when it needs them.

/// How many threads a call may use: the cores that this process may use (its affinity, and the
/// limit of its control group, when first asked), or XPURUNTIME_CPU_THREADS where that is set. The
/// same for the whole life of the process. Throws InputError when the variable cannot be read.
int thread_count();

namespace detail {
using Task = void (*)(void* context, std::int64_t task, int worker);
void run_tasks(std::int64_t tasks, bool share, Task work, void* context);
}  // namespace detail

/// Steps of work, such as elements touched or multiplications, below which waking a thread takes
/// longer than it saves.
inline constexpr std::int64_t kWorthWaking = 32768;

/// Calls work(task, worker) once for each task in [0, tasks), on several threads when all tasks
/// together take `steps` steps, at least kWorthWaking, and returns when all are done. `worker` is
/// in [0, thread_count()), and no two tasks of one call run at the same time with the same one, so
/// it names scratch memory. `work` must not throw.
template <typename Work>
void parallel_for(std::int64_t tasks, std::int64_t steps, Work&& work) {
  using Plain = std::remove_reference_t<Work>;
  detail::run_tasks(
      tasks, steps >= kWorthWaking,
      [](void* context, std::int64_t task, int worker) {
        (*static_cast<Plain*>(context))(task, worker);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(work))));
}

}  // namespace xpuruntime::cpu

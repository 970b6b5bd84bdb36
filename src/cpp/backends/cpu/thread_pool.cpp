// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "cpu/cores.h"

namespace xpuruntime::cpu {
namespace {

// How long a thread looks out for the next call before it sleeps.
constexpr std::chrono::microseconds kLookOut{200};

struct Job {
  detail::Task work = nullptr;
  void* context = nullptr;
  std::int64_t tasks = 0;
};

class ThreadPool {
 public:
  explicit ThreadPool(ThreadPool* before) : before_(before) {}

  // False when the threads serve another call.
  bool run(const Job& job) {
    {
      const std::scoped_lock lock(mutex_);
      if (busy_) return false;
      busy_ = true;
      start();
      job_ = job;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    arrived_.notify_all();
    take_tasks(job, 0);
    std::unique_lock lock(mutex_);
    open_ = false;
    finished_.wait(lock, [this] { return active_ == 0; });
    busy_ = false;
    return true;
  }

 private:
  void start() {
    if (started_) return;
    started_ = true;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int worker = 1; worker < thread_count(); ++worker) {
        std::thread([this, worker] { serve(worker); }).detach();
      }
    } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
      // The system gives no more threads: those there are do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (generation_.load(std::memory_order_relaxed) == seen) {
        lock.unlock();
        look_out(seen);
        lock.lock();
      }
      arrived_.wait(lock, [&] { return open_ && generation_.load() != seen; });
      seen = generation_.load();
      const Job job = job_;
      ++active_;
      lock.unlock();
      take_tasks(job, worker);
      lock.lock();
      // Every task is taken now, so a thread that wakes up late has nothing to do.
      open_ = false;
      if (--active_ == 0) finished_.notify_one();
    }
  }

  // Calls often follow each other closely, and waking a thread that sleeps takes long.
  void look_out(std::uint64_t seen) const {
    const auto end = std::chrono::steady_clock::now() + kLookOut;
    while (generation_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 32; ++i) pause();
      if (std::chrono::steady_clock::now() > end) return;
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  void take_tasks(const Job& job, int worker) {
    for (;;) {
      const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.tasks) return;
      job.work(job.context, task, worker);
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_, finished_;
  bool started_ = false;
  bool busy_ = false;  // a caller is here
  bool open_ = false;  // there may be tasks left
  int active_ = 0;     // threads of the pool at work
  std::atomic<std::uint64_t> generation_{0};
  Job job_;
  std::atomic<std::int64_t> next_{0};
  // Of the parent process: given up, because its mutex may be held by a thread that is not here.
  ThreadPool* before_;
};

std::atomic<ThreadPool*>& current() {
  static std::atomic<ThreadPool*> pool{new ThreadPool(nullptr)};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current().store(new ThreadPool(current().load())); });
  static_cast<void>(registered);
  return pool;
}

}  // namespace

int thread_count() {
  static const int count = [] {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): read once.
    const char* text = std::getenv("XPURUNTIME_CPU_THREADS");
    return parse_thread_count(text == nullptr ? std::string() : std::string(text), usable_cores());
  }();
  return count;
}

namespace detail {

void run_tasks(std::int64_t tasks, bool share, Task work, void* context) {
  const Job job{work, context, tasks};
  if (share && tasks > 1 && thread_count() > 1 && current().load()->run(job)) return;
  for (std::int64_t task = 0; task < tasks; ++task) work(context, task, 0);
}

}  // namespace detail
}  // namespace xpuruntime::cpu

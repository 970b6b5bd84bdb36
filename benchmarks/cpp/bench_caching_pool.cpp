// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// Throughput of a caching pool that 8 threads share, while the device's own allocation and free are
// slow:
//
//     bench_caching_pool [threads] [microseconds a device call] [seconds]
//
// The device is host memory behind a sleep, which is what cudaMalloc and cudaFree are to a thread
// that waits for them; device calls of several threads take turns, as in the CUDA driver. Threads
// allocate and free cached sizes and sleep 20 us in between, and thread 0 takes memory from the
// device and gives it back, again and again.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "xpuruntime/memory_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kWork(20);  // a thread sleeps between two allocations
constexpr std::chrono::microseconds kStall(300);

class SlowResource final : public xpuruntime::MemoryResource {
 public:
  explicit SlowResource(std::chrono::microseconds call) : call_(call) {}
  xpuruntime::DeviceId device() const noexcept override {
    return {xpuruntime::DeviceType::kCpu, 0};
  }
  bool host_accessible() const noexcept override { return true; }
  xpuruntime::MemoryInfo memory_info() noexcept override { return {}; }
  void* allocate(std::size_t bytes, xpuruntime::StreamHandle /*stream*/) override {
    const std::lock_guard lock(mutex_);
    std::this_thread::sleep_for(call_);
    return ::operator new(bytes, std::align_val_t{256}, std::nothrow);
  }
  void deallocate(void* pointer, std::size_t /*bytes*/,
                  xpuruntime::StreamHandle /*stream*/) noexcept override {
    const std::lock_guard lock(mutex_);
    std::this_thread::sleep_for(call_);
    ::operator delete(pointer, std::align_val_t{256});
  }

 private:
  std::mutex mutex_;
  const std::chrono::microseconds call_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int at, double value) {
    return argc > at ? std::atof(argv[at]) : value;
  };
  const auto threads = static_cast<unsigned>(argument(1, 8));
  const std::chrono::microseconds call(static_cast<long>(argument(2, 500)));
  const auto span = std::chrono::duration<double>(argument(3, 3));

  const auto pool = xpuruntime::make_caching_pool("caching", std::make_unique<SlowResource>(call),
                                                  {.name = "bench", .limit = {}});
  constexpr std::size_t kSizes[] = {4096, std::size_t{64} << 10, std::size_t{1} << 20};
  // Fills the cache, so that the sizes above are served from it.
  {
    std::vector<xpuruntime::Buffer> warm;
    for (unsigned i = 0; i < threads; ++i) {
      for (const std::size_t size : kSizes) warm.push_back(pool->allocate(size));
    }
  }
  std::atomic<bool> stop{false};
  std::vector<std::uint64_t> rounds(threads);
  std::vector<std::uint64_t> stalls(threads);
  std::vector<Clock::duration> worst(threads);
  std::uint64_t device_calls = 0;
  std::vector<std::thread> workers;
  for (unsigned index = 0; index < threads; ++index) {
    workers.emplace_back([&, index] {
      std::uint64_t count = 0;
      std::uint64_t late = 0;
      Clock::duration longest{};
      while (!stop.load(std::memory_order_relaxed)) {
        if (index == 0) {
          pool->allocate(std::size_t{24} << 20).reset();
          device_calls += pool->trim(std::size_t{8} << 20) > 0 ? 2U : 1U;
        } else {
          const auto asked = Clock::now();
          const xpuruntime::Buffer buffer = pool->allocate(kSizes[count % std::size(kSizes)]);
          const auto given = Clock::now();
          if (given - asked > kStall) ++late;
          longest = std::max(longest, given - asked);
          ++count;
          std::this_thread::sleep_for(kWork);
        }
      }
      rounds[index] = count;
      stalls[index] = late;
      worst[index] = longest;
    });
  }
  const auto begin = Clock::now();
  std::this_thread::sleep_for(span);
  stop = true;
  for (std::thread& worker : workers) worker.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const auto total = std::accumulate(rounds.begin(), rounds.end(), std::uint64_t{0});
  const auto late = std::accumulate(stalls.begin(), stalls.end(), std::uint64_t{0});
  const std::chrono::duration<double, std::milli> longest =
      *std::max_element(worst.begin(), worst.end());
  std::printf(
      "%u threads, %ld us a device call: %.0f cached allocations a second, %.0f of them later than "
      "%ld us, the longest "
      "%.2f ms; %.0f device calls a second\n",
      threads, static_cast<long>(call.count()), static_cast<double>(total) / seconds,
      static_cast<double>(late) / seconds, static_cast<long>(kStall.count()), longest.count(),
      static_cast<double>(device_calls) / seconds);
  return 0;
}

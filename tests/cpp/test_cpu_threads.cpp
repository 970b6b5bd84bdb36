// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "cpu/cores.h"
#include "cpu/thread_pool.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cpu {
namespace {

constexpr std::int64_t kMuch = 1 << 30;

TEST(CpuThreads, EveryTaskOnce) {
  for (const std::int64_t tasks : {0, 1, 2, 3, 17, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(tasks));
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(thread_count()));
    parallel_for(tasks, kMuch, [&](std::int64_t task, int worker) {
      EXPECT_EQ(busy[static_cast<std::size_t>(worker)].fetch_add(1), 0);
      done[static_cast<std::size_t>(task)].fetch_add(1);
      busy[static_cast<std::size_t>(worker)].fetch_sub(1);
    });
    for (const auto& count : done) EXPECT_EQ(count.load(), 1);
  }
}

TEST(CpuThreads, WritesAreSeenByTheCaller) {
  std::vector<int> values(4096);
  for (int round = 1; round <= 300; ++round) {
    parallel_for(64, kMuch, [&](std::int64_t task, int) {
      for (std::size_t i = 0; i < 64; ++i) values[static_cast<std::size_t>(task) * 64 + i] += 1;
    });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), 0), round * 4096);
  }
}

TEST(CpuThreads, ManyCallersAndNestedCalls) {
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 16; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        parallel_for(8, kMuch, [&](std::int64_t, int) {
          parallel_for(4, kMuch, [&](std::int64_t, int) { total.fetch_add(1); });
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 16 * 50 * 8 * 4);
}

TEST(CpuThreads, LittleWorkStaysHere) {
  std::set<std::thread::id> threads;
  parallel_for(100, kWorthWaking - 1,
               [&](std::int64_t, int) { threads.insert(std::this_thread::get_id()); });
  EXPECT_EQ(threads, std::set{std::this_thread::get_id()});
}

TEST(CpuThreads, ForkedChildHasItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow a fork of a process with threads";
#endif
  std::atomic<int> total{0};
  const auto work = [&] {
    parallel_for(100, kMuch, [&](std::int64_t, int) { total.fetch_add(1); });
  };
  work();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (int i = 0; i < 10; ++i) work();
    _exit(total.load() == 1100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  work();
  EXPECT_EQ(total.load(), 200);
}

class CpuCores : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("cpu_cores_" + std::to_string(getpid()));
    std::filesystem::create_directories(root_);
    all_ = usable_cores((root_ / "none").string(), (root_ / "none").string());
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  int cores() { return usable_cores(root_.string(), (root_ / "self").string()); }

  std::filesystem::path root_;
  int all_ = 0;
};

TEST_F(CpuCores, NothingLimits) {
  EXPECT_GE(all_, 1);
  write("cpu.max", "max 100000\n");
  EXPECT_EQ(cores(), all_);
}

TEST_F(CpuCores, QuotaOfVersion2) {
  write("cpu.max", "100000 100000\n");
  EXPECT_EQ(cores(), 1);
  write("cpu.max", "20000 100000\n");
  EXPECT_EQ(cores(), 1);
  write("cpu.max", "99900000 100000\n");
  EXPECT_EQ(cores(), all_);
}

TEST_F(CpuCores, QuotaOfAParent) {
  write("self", "0::/a/b/c\n");
  write("a/cpu.max", "100000 100000\n");
  write("a/b/c/cpu.max", "max 100000\n");
  EXPECT_EQ(cores(), 1);
}

TEST_F(CpuCores, QuotaOfVersion1) {
  write("self", "4:cpu,cpuacct:/job\n2:memory:/job\n");
  write("cpu/job/cpu.cfs_quota_us", "50000\n");
  write("cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores(), 1);
  write("cpu/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cores(), all_);
}

TEST_F(CpuCores, NonsenseLimitsNothing) {
  write("cpu.max", "many\n");
  write("self", "what\n");
  EXPECT_EQ(cores(), all_);
}

TEST(CpuThreads, Variable) {
  EXPECT_EQ(parse_thread_count("", 7), 7);
  EXPECT_EQ(parse_thread_count("3", 7), 3);
  EXPECT_EQ(parse_thread_count("1024", 7), 1024);
  for (const char* text : {"0", "-1", "1025", "two", "2 ", "2.5", "99999999999"}) {
    try {
      parse_thread_count(text, 7);
      ADD_FAILURE() << text;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("XPURUNTIME_CPU_THREADS is '" + std::string(text)),
                std::string::npos);
    }
  }
}

}  // namespace
}  // namespace xpuruntime::cpu

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

template <typename Expected, typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  ADD_FAILURE() << "the expected error was not thrown";
  return {};
}

TEST(Types, DevicesRoundTrip) {
  for (const char* name : {"cpu", "cuda:0", "cuda:17"})
    EXPECT_EQ(to_string(parse_device(name)), name);
  EXPECT_EQ(to_string(parse_device("cuda")), "cuda:0");
  for (const char* name :
       {"", "CPU", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999"}) {
    EXPECT_THROW(parse_device(name), InputError) << name;
  }
}

TEST(DeviceManager, AlwaysHasTheCpu) {
  DeviceManager manager;
  EXPECT_EQ(manager.get_device_count(DeviceType::kCpu), 1);
  const DeviceInfo cpu = manager.get_device_info({});
  EXPECT_FALSE(cpu.name.empty());
  EXPECT_GT(cpu.cores, 0);
  EXPECT_GT(cpu.total_memory, std::size_t{1} << 20);
  const MemoryInfo memory = manager.memory_info({});
  EXPECT_GT(memory.free, 0U);
  EXPECT_LE(memory.free, memory.total);
  EXPECT_NE(std::find(cpu.dtypes.begin(), cpu.dtypes.end(), "fp32"), cpu.dtypes.end());
  manager.synchronize({});
}

TEST(DeviceManager, ListsAllConsistently) {
  DeviceManager manager;
  const int cuda = manager.get_device_count(DeviceType::kCuda);
  EXPECT_EQ(manager.get_device_count(), cuda + 1);
  EXPECT_EQ(manager.get_all_devices().size(), static_cast<std::size_t>(cuda) + 1);
  EXPECT_EQ(manager.cuda_reason().empty(), cuda > 0);
}

TEST(DeviceManager, NamesWhatExists) {
  DeviceManager manager;
  const std::string missing =
      message_of<CudaError>([&] { manager.require({DeviceType::kCuda, 99}); });
  EXPECT_NE(missing.find("cuda:99"), std::string::npos) << missing;
  EXPECT_NE(missing.find("this machine has 'cpu'"), std::string::npos) << missing;
  const std::string negative =
      message_of<InputError>([&] { manager.require({DeviceType::kCuda, -1}); });
  EXPECT_NE(negative.find("-1"), std::string::npos) << negative;
  EXPECT_THROW(manager.require({DeviceType::kCpu, 1}), InputError);
}

TEST(DeviceManager, TheCurrentDeviceWithoutCuda) {
  DeviceManager manager;
  if (manager.get_device_count(DeviceType::kCuda) != 0) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_EQ(manager.get_current_device(), DeviceId{});
  manager.set_current_device({});
  EXPECT_THROW(manager.set_current_device({DeviceType::kCuda, 0}), CudaError);
}

TEST(DeviceManager, ProbesOnceFromManyThreads) {
  DeviceManager manager;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { (void)manager.get_all_devices(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(manager.get_device_count(), 1);
}

}  // namespace
}  // namespace xpuruntime

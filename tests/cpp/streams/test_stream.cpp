// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/event.h"
#include "xpuruntime/graph.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/stream_manager.h"

namespace xpuruntime {
namespace {

constexpr DeviceId kCpu{};
constexpr DeviceId kMissing{DeviceType::kCuda, 99};

TEST(Stream, OfTheCpuIsAlwaysComplete) {
  const Stream stream = Stream::create(kCpu);
  EXPECT_TRUE(stream.query());
  EXPECT_TRUE(stream.owned());
  EXPECT_FALSE(stream.capturing());
  EXPECT_EQ(stream.handle(), 0U);
  stream.synchronize();
  stream.wait_event(Event(kCpu));
  stream.wait_stream(Stream::wrap(kCpu, 0));
}

TEST(Stream, RefusesWhatCudaWouldClamp) {
  EXPECT_THROW(Stream::create(kCpu, {.priority = 1, .non_blocking = true}), InputError);
  EXPECT_THROW(Stream::create(kCpu, {.priority = -1, .non_blocking = true}), InputError);
  EXPECT_THROW(Stream::wrap(kCpu, 7), InputError);
}

TEST(Stream, OfADeviceThatIsNotThereIsAnError) {
  EXPECT_THROW(Stream::create(kMissing), Error);
  EXPECT_THROW(Stream::wrap(kMissing, 0), Error);
  EXPECT_THROW(Stream::priority_range(kMissing), Error);
  EXPECT_THROW(Event(kMissing, true), Error);
}

TEST(Stream, KeepsTheOwnerOfAForeignOne) {
  auto owner = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = owner;
  {
    const Stream first = Stream::wrap(kCpu, 0, std::move(owner));
    const Stream second = first;
    EXPECT_FALSE(second.owned());
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Event, MeasuresTimeOnTheCpu) {
  const Stream stream = Stream::create(kCpu);
  const Event start = stream.record(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const Event end = stream.record(true);
  EXPECT_GE(Event::elapsed_us(start, end), 5000.0);
  EXPECT_EQ(Event::elapsed_us(end, start), -Event::elapsed_us(start, end));
  EXPECT_THROW(Event::elapsed_us(start, stream.record()), InputError);
  EXPECT_THROW(Event::elapsed_us(stream.record(), end), InputError);
  EXPECT_THROW(Event::elapsed_us(start, Event(kCpu, true)), InputError);
}

TEST(Graph, OnTheCpuSaysWhyNot) {
  Graph graph;
  try {
    graph.begin_capture(Stream::create(kCpu));
    FAIL() << "a CPU stream was captured";
  } catch (const UnsupportedOperationError& error) {
    EXPECT_NE(std::string(error.what()).find("nothing to record"), std::string::npos)
        << error.what();
    EXPECT_EQ(error.device(), "cpu");
  }
  EXPECT_FALSE(graph.capturing());
  EXPECT_FALSE(graph.device().has_value());
  EXPECT_EQ(graph.node_count(), 0U);
}

TEST(Graph, RefusesStepsOutOfOrder) {
  Graph graph;
  EXPECT_THROW(graph.end_capture(), InputError);
  EXPECT_THROW(graph.instantiate(), InputError);
  EXPECT_THROW(graph.replay(Stream::create(kCpu)), InputError);
  EXPECT_THROW(graph.update(Graph()), InputError);
  EXPECT_THROW(graph.update(graph), InputError);
  graph.abort_capture();
}

TEST(StreamManager, GivesOneDefaultStream) {
  StreamManager manager;
  EXPECT_EQ(manager.default_stream(kCpu), manager.default_stream(kCpu));
  EXPECT_EQ(&StreamManager::instance(), &StreamManager::instance());
  EXPECT_THROW(manager.default_stream(kMissing), Error);
  EXPECT_THROW(manager.default_stream(kMissing), Error);
  EXPECT_THROW(manager.pooled(kCpu, 1), InputError);
  for (std::size_t i = 0; i < 3 * StreamManager::kPoolSize; ++i)
    EXPECT_TRUE(manager.pooled(kCpu).query());
}

TEST(StreamManager, ServesSixteenThreads) {
  StreamManager manager;
  const Event shared(kCpu, true);
  Graph graph;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 16; ++id) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const Stream stream = i % 2 == 0 ? manager.pooled(kCpu) : manager.default_stream(kCpu);
        shared.record(stream);
        const Event mine = stream.record(true);
        stream.wait_event(shared);
        if (Event::elapsed_us(mine, stream.record(true)) < 0.0 || !shared.query()) ++wrong;
        if (graph.capturing() || graph.node_count() != 0) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace xpuruntime

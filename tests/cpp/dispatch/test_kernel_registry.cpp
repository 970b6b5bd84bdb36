// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <thread>

#include "fake_kernels.h"

namespace xpuruntime {
namespace {

using testing::Bench;
using testing::FakeBackend;
using testing::FakeDefinition;
using testing::matmul;

TEST(KernelRegistry, KeepsTheOrderOfRegistration) {
  Bench bench;
  bench.add("b.one");
  bench.add("a.two");
  bench.add("b.three", OpKind::kConv);
  const auto matmuls = bench.registry.kernels(OpKind::kMatmul);
  ASSERT_EQ(matmuls.size(), 2U);
  EXPECT_EQ(matmuls[0]->id(), "b.one");
  EXPECT_EQ(matmuls[1]->id(), "a.two");
  EXPECT_EQ(bench.registry.kernels().size(), 3U);
  EXPECT_TRUE(bench.registry.kernels(OpKind::kLayerNorm).empty());
}

TEST(KernelRegistry, FindsByIdFamilyAndBackend) {
  Bench bench;
  bench.add("blas.lt")->words = {"fast"};
  bench.add("blas.ex");
  bench.add("raw.skinny")->words = {"fast"};
  const auto ids = [&](std::string_view word) {
    std::string text;
    for (const auto& kernel : bench.registry.find(OpKind::kMatmul, word)) {
      text.append(kernel->id()).append(" ");
    }
    return text;
  };
  EXPECT_EQ(ids("blas.ex"), "blas.ex ");
  EXPECT_EQ(ids("blas"), "blas.lt blas.ex ");
  EXPECT_EQ(ids("fast"), "blas.lt raw.skinny ");
  EXPECT_EQ(ids("Fast"), "");
  EXPECT_EQ(ids(""), "");
  EXPECT_TRUE(bench.registry.find(OpKind::kConv, "blas").empty());
}

TEST(KernelRegistry, RefusesWhatIsNoKernel) {
  Bench bench;
  const auto backend = std::make_shared<FakeBackend>("blas");
  for (const char* id : {"", "blas", "blas.", ".lt", "blas.lt.x", "blas.l t", "other.lt", "blas.1t",
                         "blas.lt@2", "Blas.lt"}) {
    EXPECT_THROW(bench.registry.add(std::make_shared<FakeDefinition>(backend, id)), InputError)
        << id;
  }
  EXPECT_THROW(bench.registry.add(nullptr), InputError);
  EXPECT_EQ(bench.registry.version(), 1U);
  bench.registry.add(std::make_shared<FakeDefinition>(backend, "blas.lt"));
  EXPECT_THROW(bench.registry.add(std::make_shared<FakeDefinition>(backend, "blas.lt")),
               InputError);
  bench.registry.add(std::make_shared<FakeDefinition>(backend, "blas.lt", OpKind::kConv));
}

TEST(KernelRegistry, AddsAllOrNone) {
  Bench bench;
  bench.add("a.one");
  const std::uint64_t before = bench.registry.version();
  const auto ours = std::make_shared<FakeBackend>("b");
  const auto make = [](const auto& backend, const char* id) {
    return std::make_shared<FakeDefinition>(backend, id);
  };
  const auto good = make(ours, "b.one");
  EXPECT_THROW(bench.registry.add_all({good, nullptr}), InputError);
  EXPECT_THROW(bench.registry.add_all({good, make(ours, "b two")}), InputError);
  EXPECT_THROW(bench.registry.add_all({good, make(ours, "b.one")}), InputError);
  const auto same_name = std::make_shared<FakeBackend>("a");
  EXPECT_THROW(bench.registry.add_all({good, make(same_name, "a.one")}), InputError);
  EXPECT_THROW(bench.registry.add_all({good, make(same_name, "a.two")}), InputError);
  EXPECT_EQ(bench.registry.kernels().size(), 1U);
  EXPECT_EQ(bench.registry.version(), before);

  bench.registry.add_all({good, make(ours, "b.two")});
  bench.registry.add_all({make(ours, "b.three")});
  EXPECT_EQ(bench.registry.kernels().size(), 4U);
  EXPECT_GT(bench.registry.version(), before);
}

TEST(KernelRegistry, RemovesABackend) {
  Bench bench;
  const std::weak_ptr<FakeDefinition> gone = bench.add("a.one");
  bench.add("b.one");
  bench.add("a.two", OpKind::kConv);
  const std::uint64_t before = bench.registry.version();
  EXPECT_EQ(bench.registry.remove("nobody"), 0U);
  EXPECT_EQ(bench.registry.version(), before);
  EXPECT_EQ(bench.registry.remove("a"), 2U);
  EXPECT_TRUE(gone.expired());
  EXPECT_GT(bench.registry.version(), before);
  EXPECT_EQ(bench.registry.kernels().size(), 1U);
  bench.add("a.one");  // the name is free again
}

TEST(KernelRegistry, ManyThreads) {
  Bench bench;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&bench, i] {
      const std::string name = "b" + std::to_string(i);
      const auto backend = std::make_shared<FakeBackend>(name);
      for (int turn = 0; turn < 50; ++turn) {
        bench.registry.add(std::make_shared<FakeDefinition>(backend, name + ".k"));
        EXPECT_EQ(bench.registry.find(OpKind::kMatmul, name).size(), 1U);
        EXPECT_EQ(bench.registry.remove(name), 1U);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bench.registry.version(), 1U + 8 * 50 * 2);
}

TEST(NullBackend, WritesZerosWhereItIsToldAndNowhereElse) {
  const KernelRegistry registry;
  DeviceManager devices;
  OpDesc op = matmul(3, 4, 2);
  op.tensors[slots::Matmul::kOut].strides = {6, 1};  // a gap of two after each row
  const auto found = registry.find(OpKind::kMatmul, "null.null");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_FALSE(found[0]->automatic());
  const DeviceInfo& cpu = devices.get_device_info({});
  EXPECT_TRUE(found[0]->supports(op, cpu).ok);
  EXPECT_FALSE(
      found[0]->supports(matmul(1, 1, 1, op.tensors[0].dtype, {DeviceType::kCuda, 0}), cpu).ok);
  EXPECT_THROW((void)found[0]->prepare(op, cpu, "fast"), InputError);
  const auto kernel = found[0]->prepare(op, cpu, {});
  std::array<float, 6> a{1, 1, 1, 1, 1, 1};
  std::array<float, 8> b{2, 2, 2, 2, 2, 2, 2, 2};
  std::array<float, 18> out{};
  out.fill(5);
  std::array<void*, kMaxSlots> operands{};
  operands[slots::Matmul::kA] = a.data();
  operands[slots::Matmul::kB] = b.data();
  operands[slots::Matmul::kOut] = out.data();
  kernel->launch(operands.data(), nullptr, 0);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i % 6 < 4 ? 0.0F : 5.0F) << i;
  EXPECT_EQ(a[0], 1.0F);
  // One for every operation.
  for (std::size_t kind = 0; kind < kOpKinds; ++kind) {
    EXPECT_EQ(registry.find(static_cast<OpKind>(kind), "null").size(), 1U);
  }
}

}  // namespace
}  // namespace xpuruntime

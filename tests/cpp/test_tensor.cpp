// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "fake_memory.h"
#include "xpuruntime/dlpack_exchange.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_pool.h"
#include "xpuruntime/tensor.h"

namespace xpuruntime {
namespace {

constexpr DType kFloat32{kDLFloat, 32, 1};
constexpr DeviceId kCpu{};
using Dims = std::vector<std::int64_t>;

Tensor counting(const Dims& shape) {
  Tensor tensor = Tensor::empty(shape, kFloat32, kCpu);
  auto* const values = static_cast<float*>(tensor.data());
  std::iota(values, values + tensor.layout().elements(), 0.0F);
  return tensor;
}

// The same bytes with the last two dimensions changed over.
Tensor transposed(const Tensor& tensor) {
  Dims shape(tensor.layout().shape().begin(), tensor.layout().shape().end());
  Dims strides(tensor.layout().strides().begin(), tensor.layout().strides().end());
  std::swap(shape[0], shape[1]);
  std::swap(strides[0], strides[1]);
  auto storage = std::make_shared<Storage>();
  storage->on_release(new Tensor(tensor),
                      [](void* kept) noexcept { delete static_cast<Tensor*>(kept); });
  return {std::move(storage), tensor.data(), tensor.dtype(), Layout(shape, strides), kCpu};
}

TEST(DType, NamesReadBack) {
  for (const char* name : {"bool", "int8", "uint64", "float16", "bfloat16", "float32", "complex128",
                           "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"}) {
    EXPECT_EQ(to_string(parse_dtype(name)), name);
  }
  EXPECT_EQ(parse_dtype("complex128").itemsize(), 16U);
  EXPECT_THROW(parse_dtype("float"), InputError);
  EXPECT_FALSE(is_known({kDLFloat, 32, 4}));
  EXPECT_EQ(to_string(DType{kDLFloat4_e2m1fn, 4, 1}), "dlpack(code=17, bits=4, lanes=1)");
}

TEST(DType, TypestrReadsBack) {
  for (const char* name : {"bool", "int8", "int64", "uint16", "float16", "float64", "complex64"}) {
    EXPECT_EQ(to_string(parse_typestr(to_typestr(parse_dtype(name)))), name);
  }
  EXPECT_EQ(to_typestr(parse_dtype("bfloat16")), "");
  EXPECT_EQ(parse_typestr("<i1"), parse_dtype("int8"));
  for (const char* text : {"", ">f4", "<U4", "|O", "<f", "f4", "<M8[s]"}) {
    EXPECT_THROW(parse_typestr(text), UnsupportedOperationError) << text;
  }
}

TEST(Layout, KnowsWhatIsContiguous) {
  EXPECT_TRUE(Layout().is_contiguous());
  EXPECT_EQ(Layout().elements(), 1);
  EXPECT_TRUE(Layout(Dims{2, 3, 4}).is_contiguous());
  EXPECT_TRUE(Layout(Dims{1, 3}, Dims{999, 1}).is_contiguous());
  EXPECT_TRUE(Layout(Dims{0, 3}, Dims{7, -2}).is_contiguous());
  EXPECT_FALSE(Layout(Dims{3}, Dims{-1}).is_contiguous());
  EXPECT_FALSE(Layout(Dims{2, 3}, Dims{1, 2}).is_contiguous());
  EXPECT_FALSE(Layout(Dims{2, 3}, Dims{0, 1}).is_contiguous());
}

TEST(Layout, HoldsManyDimensions) {
  const Dims shape{2, 1, 3, 1, 2, 1, 2, 1, 2};
  const Layout layout(shape);
  const Layout copy = layout;
  EXPECT_EQ(Dims(copy.shape().begin(), copy.shape().end()), shape);
  EXPECT_EQ(copy.strides()[0], 24);
  EXPECT_EQ(copy.elements(), 48);
}

TEST(Layout, RefusesNonsense) {
  constexpr std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_THROW(Layout(Dims{2, -1}), InputError);
  EXPECT_THROW(Layout(Dims{huge, huge}), InputError);
  EXPECT_THROW(Layout(Dims{2, 3}, Dims{1}), InputError);
  EXPECT_EQ(Layout(Dims{huge, huge, 0}).elements(), 0);
}

TEST(Tensor, CopiesAndMakesContiguous) {
  const Tensor source = counting({3, 4});
  const Tensor turned = transposed(source);
  EXPECT_FALSE(turned.is_contiguous());
  const Tensor flat = turned.contiguous();
  const auto* const values = static_cast<const float*>(flat.data());
  EXPECT_EQ(std::vector<float>(values, values + 4), (std::vector<float>{0, 4, 8, 1}));
  EXPECT_EQ(source.contiguous().data(), source.data());
  EXPECT_NE(source.copy().data(), source.data());
  EXPECT_EQ(source.to(kCpu).data(), source.data());

  const Tensor target = Tensor::empty(Dims{4, 3}, kFloat32, kCpu);
  target.copy_from(turned);
  EXPECT_EQ(static_cast<const float*>(target.data())[11], 11.0F);
  EXPECT_THROW(target.copy_from(source), InputError);
  EXPECT_THROW(turned.copy_from(target), InputError);
  EXPECT_THROW(target.copy_from(Tensor::empty(Dims{4, 3}, parse_dtype("int32"), kCpu)), InputError);
}

TEST(Tensor, GivesItsMemoryBackWithTheLastHandle) {
  testing::Ledger ledger;
  const auto pool = make_plain_pool("direct", testing::fake(ledger), {.name = "test", .limit = {}});
  {
    const Tensor first = Tensor::empty(Dims{10, 10}, kFloat32, kCpu, pool);
    const Tensor second = first;
    EXPECT_EQ(pool->stats().current, 400U);
    EXPECT_FALSE(second.is_last_owner());
  }
  EXPECT_EQ(pool->stats().current, 0U);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(Tensor, RefusesAPoolOfAnotherDevice) {
  testing::Ledger ledger;
  const auto pool = make_plain_pool("direct", testing::fake(ledger), {.name = "test", .limit = {}});
  EXPECT_THROW(Tensor::empty(Dims{2}, kFloat32, {DeviceType::kCuda, 0}, pool), Error);
  EXPECT_THROW(Tensor::empty(Dims{std::int64_t{1} << 61, 2}, kFloat32, kCpu, pool), InputError);
  EXPECT_EQ(ledger.bytes, 0U);
}

TEST(Storage, ReleasesOnce) {
  int released = 0;
  {
    auto storage = std::make_shared<Storage>();
    storage->on_release(&released, [](void* count) noexcept { ++*static_cast<int*>(count); });
    const Tensor tensor(storage, &released, parse_dtype("int32"), Layout(), kCpu);
    const Tensor copy = tensor;
    storage.reset();
    EXPECT_EQ(released, 0);
    EXPECT_FALSE(copy.storage().ready_event().has_value());
    EXPECT_FALSE(copy.storage().release_may_wait());
  }
  EXPECT_EQ(released, 1);
}

TEST(Dlpack, RoundTripSharesMemory) {
  const Tensor source = counting({2, 3});
  auto* const managed = to_dlpack(source, false);
  EXPECT_EQ(managed->version.major, 1U);
  EXPECT_EQ(managed->flags, 0U);
  EXPECT_EQ(managed->dl_tensor.strides[0], 3);
  const Tensor back = from_dlpack(managed, std::nullopt);
  EXPECT_EQ(back.data(), source.data());
  EXPECT_EQ(back.describe(), source.describe());

  const Tensor legacy = from_dlpack(to_dlpack_legacy(back), std::nullopt);
  EXPECT_EQ(legacy.data(), source.data());
}

TEST(Dlpack, MemoryOutlivesTheTensor) {
  DLManagedTensorVersioned* managed = nullptr;
  {
    const Tensor source = counting({1000});
    managed = to_dlpack(source, false);
  }
  EXPECT_EQ(static_cast<const float*>(managed->dl_tensor.data)[999], 999.0F);
  EXPECT_EQ(managed->dl_tensor.shape[0], 1000);
  managed->deleter(managed);
}

// Counts calls of its deleter, as every producer's tensor must see exactly one.
struct Foreign {
  int deleted = 0;
  float values[2] = {1.0F, 2.0F};
  std::array<std::int64_t, 1> shape{2};
  DLManagedTensorVersioned managed{};

  Foreign() {
    managed.version = {1, 0};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) {
      ++static_cast<Foreign*>(self->manager_ctx)->deleted;
    };
    managed.dl_tensor = {.data = values,
                         .device = {kDLCPU, 0},
                         .ndim = 1,
                         .dtype = {kDLFloat, 32, 1},
                         .shape = shape.data(),
                         .strides = nullptr,
                         .byte_offset = 0};
  }
};

TEST(Dlpack, CallsTheDeleterOnce) {
  Foreign foreign;
  {
    const Tensor tensor = from_dlpack(&foreign.managed, std::nullopt);
    const Tensor copy = tensor;
    EXPECT_EQ(copy.layout().strides()[0], 1);
    EXPECT_EQ(foreign.deleted, 0);
  }
  EXPECT_EQ(foreign.deleted, 1);
}

TEST(Dlpack, LeavesARefusedTensorToItsProducer) {
  for (const int which : {0, 1, 2, 3, 4}) {
    Foreign foreign;
    DLTensor& tensor = foreign.managed.dl_tensor;
    if (which == 0) foreign.managed.version.major = 2;
    if (which == 1) tensor.dtype.lanes = 2;
    if (which == 2) tensor.device.device_type = kDLMetal;
    if (which == 3) tensor.ndim = -1;
    if (which == 4) tensor.data = nullptr;
    EXPECT_THROW(from_dlpack(&foreign.managed, std::nullopt), Error) << which;
    EXPECT_EQ(foreign.deleted, 0) << which;
  }
}

TEST(Dlpack, ReadOnlyNeedsTheVersionedProtocol) {
  const Tensor source = counting({2});
  const Tensor readonly(std::make_shared<Storage>(), source.data(), kFloat32, Layout(Dims{2}), kCpu,
                        true);
  EXPECT_THROW(to_dlpack_legacy(readonly), UnsupportedOperationError);
  auto* const managed = to_dlpack(readonly, true);
  EXPECT_EQ(managed->flags, DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
  EXPECT_TRUE(from_dlpack(managed, std::nullopt).readonly());
  EXPECT_THROW(readonly.copy_from(source), InputError);
}

TEST(Dlpack, StreamNumbersWithoutAMeaningAreRefused) {
  const DeviceId cuda{DeviceType::kCuda, 0};
  EXPECT_THROW(consumer_stream(cuda, 0), InputError);
  EXPECT_THROW(consumer_stream(cuda, -2), InputError);
  EXPECT_FALSE(consumer_stream(cuda, -1).has_value());
  const Tensor tensor = counting({2});
  EXPECT_THROW(prepare_export(tensor, {.stream = 1, .device = {}, .copy = {}}), InputError);
  EXPECT_FALSE(prepare_export(tensor, {.stream = -1, .device = {}, .copy = {}}).second);
  EXPECT_TRUE(prepare_export(tensor, {.stream = {}, .device = {}, .copy = true}).second);
  EXPECT_THROW(
      prepare_export(tensor, {.stream = {}, .device = DLDevice{kDLCUDA, 0}, .copy = false}),
      UnsupportedOperationError);
}

TEST(Tensor, IsSharedBySixteenThreads) {
  const Tensor source = counting({64, 64});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < 16; ++id) {
    threads.emplace_back([&source, &wrong] {
      const Stream stream = Stream::create(kCpu);
      for (int i = 0; i < 100; ++i) {
        const Tensor shared = from_dlpack(to_dlpack(source, false), std::nullopt);
        const Tensor copy = transposed(shared).contiguous();
        shared.record(stream);
        shared.storage().make_wait(stream);
        if (static_cast<const float*>(copy.data())[1] != 64.0F) ++wrong;
        if (shared.storage().ready_event()) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(source.is_last_owner());
}

}  // namespace
}  // namespace xpuruntime

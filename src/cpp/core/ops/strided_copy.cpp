// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/strided_copy.h"

#include <array>
#include <cstring>
#include <string>

#include "cuda_api.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

struct Layout {
  int rank = 0;
  std::array<std::int64_t, kMaxCopyRank> shape{};
  std::array<std::int64_t, kMaxCopyRank> strides{};
};

// Drops dimensions of 1 and merges neighbours that lie one behind the other.
Layout merge(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  Layout out;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 1) continue;
    const auto last = static_cast<std::size_t>(out.rank) - 1;
    if (out.rank > 0 && out.strides[last] == strides[i] * shape[i]) {
      out.shape[last] *= shape[i];
      out.strides[last] = strides[i];
      continue;
    }
    out.shape[last + 1] = shape[i];
    out.strides[last + 1] = strides[i];
    ++out.rank;
  }
  if (out.rank == 0) {
    out.rank = 1;
    out.shape[0] = 1;
    out.strides[0] = 1;
  }
  return out;
}

template <std::size_t kItem>
void copy_row(std::byte* destination, const std::byte* source, std::int64_t count,
              std::int64_t stride) {
  if (stride == 1) {
    std::memcpy(destination, source, static_cast<std::size_t>(count) * kItem);
    return;
  }
  const std::int64_t step = stride * static_cast<std::int64_t>(kItem);
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(destination, source, kItem);
    destination += kItem;
    source += step;
  }
}

template <std::size_t kItem>
void copy_host(const Layout& layout, const std::byte* source, std::byte* destination) {
  const auto inner = static_cast<std::size_t>(layout.rank) - 1;
  const std::int64_t row = layout.shape[inner];
  std::array<std::int64_t, kMaxCopyRank> index{};
  for (;;) {
    copy_row<kItem>(destination, source, row, layout.strides[inner]);
    destination += static_cast<std::size_t>(row) * kItem;
    std::size_t dim = inner;
    for (;;) {
      if (dim == 0) return;
      --dim;
      const std::int64_t step = layout.strides[dim] * static_cast<std::int64_t>(kItem);
      if (++index[dim] < layout.shape[dim]) {
        source += step;
        break;
      }
      source -= step * (layout.shape[dim] - 1);
      index[dim] = 0;
    }
  }
}

void copy_host(const Layout& layout, const void* source, void* destination, std::size_t itemsize) {
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(destination);
  switch (itemsize) {
    case 1:
      return copy_host<1>(layout, from, to);
    case 2:
      return copy_host<2>(layout, from, to);
    case 4:
      return copy_host<4>(layout, from, to);
    case 8:
      return copy_host<8>(layout, from, to);
    default:
      return copy_host<16>(layout, from, to);
  }
}

void check_arguments(DeviceId device, const void* source, const void* destination,
                     std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                     std::size_t itemsize) {
  const std::string on = to_string(device);
  if (shape.size() != strides.size()) {
    throw InputError("copy_to_contiguous: shape has " + std::to_string(shape.size()) +
                         " dimensions and strides " + std::to_string(strides.size()) +
                         ": give one stride a dimension",
                     on);
  }
  if (shape.size() > kMaxCopyRank) {
    throw InputError("copy_to_contiguous: " + std::to_string(shape.size()) +
                         " dimensions, and at most " + std::to_string(kMaxCopyRank) +
                         " can be copied: merge or copy some of them before",
                     on);
  }
  if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8 && itemsize != 16) {
    throw InputError("copy_to_contiguous: itemsize " + std::to_string(itemsize) +
                         " is not one of 1, 2, 4, 8, 16 bytes",
                     on);
  }
  for (const std::int64_t length : shape) {
    if (length < 0) {
      throw InputError("copy_to_contiguous: dimension " + std::to_string(length) + " is negative",
                       on);
    }
  }
  const std::size_t alignment = itemsize == 16 ? 8 : itemsize;
  const auto misaligned = [&](const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % alignment != 0;
  };
  if (misaligned(source) || misaligned(destination)) {
    throw InputError("copy_to_contiguous: an address is not aligned to " +
                         std::to_string(alignment) + " bytes, as items of " +
                         std::to_string(itemsize) + " bytes need",
                     on);
  }
}

}  // namespace

void copy_to_contiguous(DeviceId device, const void* source, void* destination,
                        std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                        std::size_t itemsize, StreamHandle stream) {
  check_arguments(device, source, destination, shape, strides, itemsize);
  for (const std::int64_t length : shape) {
    if (length == 0) return;
  }
  if (source == nullptr || destination == nullptr) {
    throw InputError("copy_to_contiguous: an address is null", to_string(device));
  }
  const Layout layout = merge(shape, strides);
  if (device.type == DeviceType::kCpu) return copy_host(layout, source, destination, itemsize);
  cuda::copy_strided(device.index, source, destination, layout.rank, layout.shape.data(),
                     layout.strides.data(), itemsize, stream);
}

}  // namespace xpuruntime

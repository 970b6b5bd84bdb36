// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.h"
#include "cuda_api.h"
#include "xpuruntime/strided_copy.h"

namespace xpuruntime::cuda {
namespace {

struct alignas(8) Item16 {
  std::uint64_t words[2];
};

template <typename Index>
struct Layout {
  int rank;
  Index shape[kMaxCopyRank];
  std::int64_t strides[kMaxCopyRank];
};

// One thread an element of the destination, so that writes are coalesced; Index is 32 bits wide
// where that suffices, as 64-bit division is slow.
template <typename Item, typename Index>
__global__ void gather(const Item* __restrict__ source, Item* __restrict__ destination,
                       Layout<Index> layout, Index count) {
  const Index step = static_cast<Index>(gridDim.x) * blockDim.x;
  for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    Index rest = i;
    std::int64_t offset = 0;
    for (int dim = layout.rank - 1; dim > 0; --dim) {
      const Index next = rest / layout.shape[dim];
      offset += static_cast<std::int64_t>(rest - next * layout.shape[dim]) * layout.strides[dim];
      rest = next;
    }
    offset += static_cast<std::int64_t>(rest) * layout.strides[0];
    destination[i] = source[offset];
  }
}

constexpr int kTile = 32;
constexpr int kTileRows = 8;

// A batch of transposes: destination (batch, rows, columns) from a source whose rows are adjacent
// (row stride 1). Through shared memory, so that reads and writes are both coalesced.
template <typename Item>
__global__ void transpose(const Item* __restrict__ source, Item* __restrict__ destination, int rows,
                          int columns, std::int64_t column_stride, std::int64_t batch_stride) {
  __shared__ Item tile[kTile][kTile + 1];
  const std::int64_t batch = blockIdx.z;
  const int row0 = static_cast<int>(blockIdx.y) * kTile;
  const int column0 = static_cast<int>(blockIdx.x) * kTile;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int row = row0 + x;
    const int column = column0 + y;
    if (row < rows && column < columns) {
      tile[y][x] = source[batch * batch_stride + column * column_stride + row];
    }
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int row = row0 + y;
    const int column = column0 + x;
    if (row < rows && column < columns) {
      destination[(batch * rows + row) * columns + column] = tile[x][y];
    }
  }
}

constexpr std::int64_t kMaxGridYZ = 65535;

template <typename Item>
bool launch_transpose(const Item* source, Item* destination, int rank, const std::int64_t* shape,
                      const std::int64_t* strides, cudaStream_t stream) {
  if (rank < 2 || rank > 3 || strides[rank - 2] != 1) return false;
  const std::int64_t rows = shape[rank - 2];
  const std::int64_t columns = shape[rank - 1];
  const std::int64_t batch = rank == 3 ? shape[0] : 1;
  const std::int64_t row_tiles = (rows + kTile - 1) / kTile;
  const std::int64_t column_tiles = (columns + kTile - 1) / kTile;
  if (rows < kTile || columns < kTile || row_tiles > kMaxGridYZ || batch > kMaxGridYZ ||
      columns > INT32_MAX) {
    return false;
  }
  const dim3 grid(static_cast<unsigned>(column_tiles), static_cast<unsigned>(row_tiles),
                  static_cast<unsigned>(batch));
  transpose<<<grid, dim3(kTile, kTileRows), 0, stream>>>(
      source, destination, static_cast<int>(rows), static_cast<int>(columns), strides[rank - 1],
      rank == 3 ? strides[0] : 0);
  return true;
}

template <typename Item, typename Index>
void launch_gather(const Item* source, Item* destination, int rank, const std::int64_t* shape,
                   const std::int64_t* strides, std::int64_t count, cudaStream_t stream) {
  Layout<Index> layout{};
  layout.rank = rank;
  for (int dim = 0; dim < rank; ++dim) {
    layout.shape[dim] = static_cast<Index>(shape[dim]);
    layout.strides[dim] = strides[dim];
  }
  constexpr std::int64_t threads = 256;
  constexpr std::int64_t most_blocks = 1 << 16;
  const std::int64_t blocks = std::min((count + threads - 1) / threads, most_blocks);
  gather<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(
      source, destination, layout, static_cast<Index>(count));
}

template <typename Item>
void launch(const void* source, void* destination, int rank, const std::int64_t* shape,
            const std::int64_t* strides, cudaStream_t stream) {
  const auto* from = static_cast<const Item*>(source);
  auto* to = static_cast<Item*>(destination);
  if (launch_transpose(from, to, rank, shape, strides, stream)) return;
  std::int64_t count = 1;
  for (int dim = 0; dim < rank; ++dim) count *= shape[dim];
  // Room for one more grid step, so that the 32-bit counter cannot wrap.
  if (count < (std::int64_t{1} << 31)) {
    launch_gather<Item, std::uint32_t>(from, to, rank, shape, strides, count, stream);
  } else {
    launch_gather<Item, std::uint64_t>(from, to, rank, shape, strides, count, stream);
  }
}

}  // namespace

void copy_strided(int device, const void* source, void* destination, int rank,
                  const std::int64_t* shape, const std::int64_t* strides, std::size_t itemsize,
                  StreamHandle stream) {
  const DeviceGuard guard(device);
  const cudaStream_t on = as_stream(stream);
  if (rank == 1 && strides[0] == 1) {
    check(cudaMemcpyAsync(destination, source, static_cast<std::size_t>(shape[0]) * itemsize,
                          cudaMemcpyDefault, on),
          "cudaMemcpyAsync", device);
    return;
  }
  switch (itemsize) {
    case 1:
      launch<std::uint8_t>(source, destination, rank, shape, strides, on);
      break;
    case 2:
      launch<std::uint16_t>(source, destination, rank, shape, strides, on);
      break;
    case 4:
      launch<std::uint32_t>(source, destination, rank, shape, strides, on);
      break;
    case 8:
      launch<std::uint64_t>(source, destination, rank, shape, strides, on);
      break;
    default:
      launch<Item16>(source, destination, rank, shape, strides, on);
      break;
  }
  check(cudaGetLastError(), "strided copy kernel launch", device);
}

}  // namespace xpuruntime::cuda

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "tuning/tuner_operands.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

#include "streams/stream_calls.h"
#include "xpuruntime/memory_pool.h"

namespace xpuruntime {
namespace {

constexpr std::size_t kLine = 256;
constexpr std::size_t kMaxNoise = std::size_t{4} << 20U;

std::size_t round_up(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

using Random = std::mt19937_64;

template <typename Word, typename Make>
std::vector<std::byte> noise_of(std::size_t bytes, Make make) {
  std::vector<std::byte> noise(bytes);
  for (std::size_t at = 0; at + sizeof(Word) <= bytes; at += sizeof(Word)) {
    const Word word = make();
    std::memcpy(noise.data() + at, &word, sizeof word);
  }
  return noise;
}

// Numbers of either sign between 1/4 and 2, made of their bits: sign, three exponents, mantissa.
template <typename Word>
std::vector<std::byte> floats(std::size_t bytes, unsigned int mantissa, unsigned int bias,
                              Random& random) {
  return noise_of<Word>(bytes, [&] {
    const std::uint64_t bits = random();
    const std::uint64_t sign = (bits >> 63U) << (8 * sizeof(Word) - 1);
    const std::uint64_t exponent = (bias - 2 + (bits >> 56U) % 3) << mantissa;
    const std::uint64_t rest = bits & ((std::uint64_t{1} << mantissa) - 1);
    return static_cast<Word>(sign | exponent | rest);
  });
}

std::vector<std::byte> noise(DType dtype, std::size_t bytes, Random& random) {
  switch (dtype.code) {
    case kDLFloat:
      if (dtype.bits == 64) return floats<std::uint64_t>(bytes, 52, 1023, random);
      if (dtype.bits == 32) return floats<std::uint32_t>(bytes, 23, 127, random);
      return floats<std::uint16_t>(bytes, 10, 15, random);
    case kDLBfloat:
      return floats<std::uint16_t>(bytes, 7, 127, random);
    case kDLFloat8_e5m2:
      return floats<std::uint8_t>(bytes, 2, 15, random);
    case kDLFloat8_e4m3:
    case kDLFloat8_e4m3fn:
      return floats<std::uint8_t>(bytes, 3, 7, random);
    case kDLInt:
      if (dtype.bits == 64) return noise_of<std::uint64_t>(bytes, [&] { return random() % 1000; });
      break;
    default:
      break;
  }
  // Small numbers, and for a mask: attend.
  return noise_of<std::uint8_t>(bytes, [] { return std::uint8_t{1}; });
}

}  // namespace

OperandPlan::OperandPlan(const OpDesc& op) {
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (!op.has(slot)) continue;
    const TensorDesc& tensor = op[slot];
    std::int64_t below = 0;
    std::int64_t above = 0;
    bool empty = false;
    for (std::size_t dim = 0; dim < tensor.rank; ++dim) {
      empty = empty || tensor.shape[dim] == 0;
      const std::int64_t reach = (tensor.shape[dim] - 1) * tensor.strides[dim];
      (reach < 0 ? below : above) += reach;
    }
    const std::size_t itemsize = tensor.dtype.itemsize();
    const std::size_t before = empty ? 0 : static_cast<std::size_t>(-below) * itemsize;
    bytes[slot] = empty ? 0 : static_cast<std::size_t>(above - below + 1) * itemsize;
    // The origin's address is a multiple of its alignment, and of no larger power of two.
    const std::size_t wanted = tensor.alignment >= 8 ? 0 : std::size_t{1} << tensor.alignment;
    origin[slot] = total + round_up(before) + wanted;
    first[slot] = origin[slot] - before;
    total = round_up(first[slot] + bytes[slot] + 1);
  }
  total = std::max(total, kLine);
}

TunerOperands::TunerOperands(const OpDesc& op, const OperandPlan& plan, std::size_t sets,
                             std::size_t workspace_bytes, MemoryPool& pool, const Stream& stream)
    : operands_(pool.allocate(plan.total * sets, stream.handle())) {
  if (workspace_bytes > 0) workspace_ = pool.allocate(workspace_bytes, stream.handle());
  for (std::size_t set = 0; set < sets; ++set) {
    std::byte* const base = static_cast<std::byte*>(operands_.data()) + set * plan.total;
    Addresses& addresses = addresses_.emplace_back();
    for (std::size_t slot = 0; slot < op.slots; ++slot) {
      addresses[slot] = op.has(slot) ? base + plan.origin[slot] : nullptr;
    }
  }
  fill(op, plan, stream);
}

// Noise is made once a dtype, brought to the device into the first set, and copied on from there.
void TunerOperands::fill(const OpDesc& op, const OperandPlan& plan, const Stream& stream) {
  // NOLINTNEXTLINE(bugprone-random-generator-seed): the same values every time
  Random random(20'260'101);
  const bool cuda = stream.device().type == DeviceType::kCuda;
  std::vector<std::vector<std::byte>> sources;
  const auto copy = [&](std::byte* to, const std::byte* from, std::size_t bytes) {
    if (cuda) {
      calls::copy_async(stream.device().index, to, from, bytes, stream.handle());
    } else {
      std::memcpy(to, from, bytes);
    }
  };
  auto* const base = static_cast<std::byte*>(operands_.data());
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (!op.has(slot) || is_output(op.kind, slot) || plan.bytes[slot] == 0) continue;
    const std::size_t bytes = plan.bytes[slot];
    const std::size_t unit = std::max<std::size_t>(op[slot].dtype.itemsize(), 1);
    const std::size_t piece = std::min(bytes, kMaxNoise / unit * unit);
    sources.push_back(noise(op[slot].dtype, piece, random));
    std::byte* const origin = base + plan.first[slot];
    copy(origin, sources.back().data(), piece);
    for (std::size_t set = 0; set < sets(); ++set) {
      std::byte* const to = origin + set * plan.total;
      for (std::size_t at = set == 0 ? piece : 0; at < bytes; at += piece) {
        copy(to + at, origin, std::min(piece, bytes - at));
      }
    }
  }
  stream.synchronize();  // the noise is on the host, and goes now
}

}  // namespace xpuruntime

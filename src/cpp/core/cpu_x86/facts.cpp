// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cpuid.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "cpu_facts.h"

namespace xpuruntime::cpu {
namespace {

enum Register { kEax, kEbx, kEcx, kEdx };
using Leaf = std::array<unsigned, 4>;

Leaf query(unsigned leaf, unsigned subleaf) {
  Leaf out{};
  if (__get_cpuid_count(leaf, subleaf, &out[0], &out[1], &out[2], &out[3]) == 0) out = {};
  return out;
}

// Register states that the system saves: an extension whose registers are not saved must not be
// used.
std::uint64_t enabled_states(const Leaf& basic) {
  constexpr unsigned osxsave = 1U << 27;
  if ((basic[kEcx] & osxsave) == 0) return 0;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

constexpr std::uint64_t kNone = 0;
constexpr std::uint64_t kAvx = 0x6;      // SSE, AVX
constexpr std::uint64_t kAvx512 = 0xE6;  // and mask registers, both halves of ZMM
constexpr std::uint64_t kAmx = 0x60000;  // tile configuration and data

struct Feature {
  const char* name;
  unsigned leaf;
  unsigned subleaf;
  Register reg;
  int bit;
  std::uint64_t states;
};

constexpr Feature kFeatures[] = {
    {"sse3", 1, 0, kEcx, 0, kNone},           {"ssse3", 1, 0, kEcx, 9, kNone},
    {"sse4_1", 1, 0, kEcx, 19, kNone},        {"sse4_2", 1, 0, kEcx, 20, kNone},
    {"popcnt", 1, 0, kEcx, 23, kNone},        {"avx", 1, 0, kEcx, 28, kAvx},
    {"f16c", 1, 0, kEcx, 29, kAvx},           {"fma", 1, 0, kEcx, 12, kAvx},
    {"bmi1", 7, 0, kEbx, 3, kNone},           {"avx2", 7, 0, kEbx, 5, kAvx},
    {"bmi2", 7, 0, kEbx, 8, kNone},           {"avx_vnni", 7, 1, kEax, 4, kAvx},
    {"avx512f", 7, 0, kEbx, 16, kAvx512},     {"avx512dq", 7, 0, kEbx, 17, kAvx512},
    {"avx512cd", 7, 0, kEbx, 28, kAvx512},    {"avx512bw", 7, 0, kEbx, 30, kAvx512},
    {"avx512vl", 7, 0, kEbx, 31, kAvx512},    {"avx512_vbmi", 7, 0, kEcx, 1, kAvx512},
    {"avx512_vbmi2", 7, 0, kEcx, 6, kAvx512}, {"avx512_vnni", 7, 0, kEcx, 11, kAvx512},
    {"avx512_bf16", 7, 1, kEax, 5, kAvx512},  {"avx512_fp16", 7, 0, kEdx, 23, kAvx512},
    {"amx_bf16", 7, 0, kEdx, 22, kAmx},       {"amx_tile", 7, 0, kEdx, 24, kAmx},
    {"amx_int8", 7, 0, kEdx, 25, kAmx},       {"amx_fp16", 7, 1, kEax, 21, kAmx},
};

}  // namespace

std::string processor_name() {
  unsigned highest = __get_cpuid_max(0x80000000U, nullptr);
  if (highest < 0x80000004U) return {};
  std::array<char, 49> text{};
  for (unsigned i = 0; i < 3; ++i) {
    const Leaf leaf = query(0x80000002U + i, 0);
    std::memcpy(text.data() + 16 * i, leaf.data(), 16);
  }
  std::string name(text.data());
  const auto first = name.find_first_not_of(' ');
  if (first == std::string::npos) return {};
  return name.substr(first, name.find_last_not_of(' ') - first + 1);
}

std::vector<std::string> features() {
  const std::uint64_t states = enabled_states(query(1, 0));
  std::vector<std::string> found;
  for (const Feature& feature : kFeatures) {
    const Leaf leaf = query(feature.leaf, feature.subleaf);
    const bool present = (leaf[feature.reg] >> feature.bit & 1U) != 0;
    if (present && (states & feature.states) == feature.states) found.emplace_back(feature.name);
  }
  return found;
}

}  // namespace xpuruntime::cpu

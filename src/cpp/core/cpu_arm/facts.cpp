// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <sys/auxv.h>

#include <fstream>

#include "cpu_facts.h"

namespace xpuruntime::cpu {
namespace {

struct Feature {
  const char* name;
  unsigned long type;
  int bit;
};

// Bits of the kernel's hardware capability words for arm64.
constexpr Feature kFeatures[] = {
    {"neon", AT_HWCAP, 1},   {"fp16", AT_HWCAP, 10}, {"dotprod", AT_HWCAP, 20},
    {"sve", AT_HWCAP, 22},   {"sve2", AT_HWCAP2, 1}, {"i8mm", AT_HWCAP2, 13},
    {"bf16", AT_HWCAP2, 14}, {"sme", AT_HWCAP2, 23},
};

}  // namespace

std::string processor_name() {
  std::ifstream file("/sys/firmware/devicetree/base/model");
  std::string name;
  std::getline(file, name, '\0');
  return name;
}

std::vector<std::string> features() {
  std::vector<std::string> found;
  for (const Feature& feature : kFeatures) {
    if ((getauxval(feature.type) >> feature.bit & 1UL) != 0) found.emplace_back(feature.name);
  }
  return found;
}

}  // namespace xpuruntime::cpu

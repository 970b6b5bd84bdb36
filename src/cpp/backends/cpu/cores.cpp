// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/cores.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <thread>

#include "xpuruntime/error.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace xpuruntime::cpu {
namespace {

int scheduled_cores() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Cores that one folder of a control group allows; 0 where it sets no limit.
double quota(const std::string& folder) {
  std::string amount;
  double period = 0;
  if (std::ifstream file(folder + "/cpu.max"); file >> amount >> period) {
    return amount == "max" || period <= 0 ? 0 : std::stod(amount) / period;
  }
  double microseconds = 0;
  std::ifstream of_quota(folder + "/cpu.cfs_quota_us");
  std::ifstream of_period(folder + "/cpu.cfs_period_us");
  if (of_quota >> microseconds && of_period >> period && microseconds > 0 && period > 0) {
    return microseconds / period;
  }
  return 0;
}

void limit(int& cores, const std::string& folder) {
  const double allowed = quota(folder);
  if (allowed > 0) cores = std::min(cores, std::max(1, static_cast<int>(std::ceil(allowed))));
}

}  // namespace

int usable_cores(const std::string& cgroup_root, const std::string& membership) {
  int cores = scheduled_cores();
  limit(cores, cgroup_root);
  limit(cores, cgroup_root + "/cpu");
  std::ifstream file(membership);
  // Lines are "0::/path" (version 2) and "4:cpu,cpuacct:/path" (version 1).
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
    const std::string base = controllers.empty() ? cgroup_root : cgroup_root + "/cpu";
    std::string path = line.substr(second + 1);
    while (path.size() > 1) {
      limit(cores, base + path);
      path.erase(path.rfind('/'));
    }
  }
  return cores;
}

int parse_thread_count(const std::string& text, int cores) {
  if (text.empty()) return cores;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1 || value > 1024) {
    throw InputError("XPURUNTIME_CPU_THREADS is '" + text +
                     "', and not a whole number from 1 to 1024: correct it, or unset it to use "
                     "all cores that this process may use (" +
                     std::to_string(cores) + ")");
  }
  return value;
}

}  // namespace xpuruntime::cpu

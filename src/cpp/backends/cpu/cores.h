// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>

namespace xpuruntime::cpu {

/// Cores that this process may use, at least 1: those it may be scheduled on, and no more than its
/// control group may use, rounded up. `cgroup_root` is where control groups (version 2 or 1) are
/// mounted and `membership` the file that says which one the process is in; what cannot be read
/// limits nothing.
int usable_cores(const std::string& cgroup_root = "/sys/fs/cgroup",
                 const std::string& membership = "/proc/self/cgroup");

/// The value of XPURUNTIME_CPU_THREADS, or `cores` where it is empty. Throws InputError unless it
/// is a whole number from 1 to 1024.
int parse_thread_count(const std::string& text, int cores);

}  // namespace xpuruntime::cpu

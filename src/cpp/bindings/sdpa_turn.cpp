// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "sdpa_turn.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "core/group_lock.h"
#include "gil.h"
#include "torch_shim.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr std::size_t kBackends = 5;

// PyTorch's functions, by the number of a backend.
struct Switches {
  const void* context = nullptr;
  std::array<bool (*)(const void*), kBackends> read{};
  std::array<void (*)(const void*, bool), kBackends> write{};
};

Switches switches;

using Enabled = std::array<bool, kBackends>;

// While a turn has the switches otherwise than the program has set them.
struct Kept {
  Enabled before{};
  Enabled during{};
  bool changed = false;
};

Kept kept;

Enabled read() {
  Enabled found{};
  for (std::size_t i = 0; i < kBackends; ++i) found[i] = switches.read[i](switches.context);
  return found;
}

// Those to be enabled first, so that threads that go past the override never find none.
void write(const Enabled& enabled) {
  for (const bool value : {true, false}) {
    for (std::size_t i = 0; i < kBackends; ++i) {
      if (enabled[i] == value) switches.write[i](switches.context, value);
    }
  }
}

void come(SdpaWish wish) {
  const std::size_t only = wish & (kOnlyIfEnabled - 1);
  if (only == 0) return;
  kept.before = read();
  if ((wish & kOnlyIfEnabled) != 0 && !kept.before[only - 1]) return;
  kept.during = {};
  kept.during[only - 1] = true;
  kept.changed = true;
  write(kept.during);
}

void go(SdpaWish /*wish*/) {
  if (!kept.changed) return;
  Enabled enabled = read();
  for (std::size_t i = 0; i < kBackends; ++i) {
    if (enabled[i] == kept.during[i]) enabled[i] = kept.before[i];
  }
  write(enabled);
  kept.changed = false;
}

// Of this thread, each inside of the one before it.
struct Turn {
  SdpaWish wish = kAsSet;
  bool own = false;  // else it shares in what surrounds it
};

thread_local std::vector<Turn> turns;

// The innermost that is no sharer, which is in.
const Turn* holder() {
  const auto found =
      std::find_if(turns.rbegin(), turns.rend(), [](const Turn& t) { return t.own; });
  return found == turns.rend() ? nullptr : &*found;
}

GroupLock& lock() {
  // Never dropped, since threads may outlive statics.
  static GroupLock& made = *new GroupLock(come, go);
  static const int registered =
      pthread_atfork([] { made.before_fork(); }, [] { made.after_fork(); },
                     [] { made.after_fork_in_child(SdpaTurn::within()); });
  static_cast<void>(registered);
  return made;
}

// PyGILState_Check says yes to everything once the process has made another interpreter.
bool has_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const now = PyThreadState_GetUnchecked();
#else
  PyThreadState* const now = _PyThreadState_UncheckedGet();
#endif
  return now != nullptr && now == PyGILState_GetThisThreadState();
}

void enter(SdpaWish wish) {
  if (lock().try_enter(wish)) return;
  if (!has_gil()) {
    lock().enter(wish);
    return;
  }
  const ReleaseGil unlocked;
  lock().enter(wish);
}

}  // namespace

void SdpaTurn::begin(SdpaWish wish) {
  const Turn* const outer = holder();
  if (outer != nullptr && (wish == kAsSet || wish == outer->wish)) {
    turns.push_back({wish, false});
    return;
  }
  if (outer != nullptr) lock().leave();
  enter(wish);
  turns.push_back({wish, true});
}

// NOLINTNEXTLINE(bugprone-exception-escape): where a lock fails, the program is over.
void SdpaTurn::end() noexcept {
  if (turns.empty()) return;
  const bool own = turns.back().own;
  turns.pop_back();
  if (!own) return;
  lock().leave();
  if (const Turn* const outer = holder(); outer != nullptr) enter(outer->wish);
}

bool SdpaTurn::within() noexcept { return !turns.empty(); }

std::string open_sdpa_switches() {
  if (switches.context != nullptr) return "";
  struct Names {
    const char* read;
    const char* write;
  };
  constexpr std::array<Names, kBackends> kNames = {{
      {"_ZNK2at7Context18userEnabledMathSDPEv", "_ZN2at7Context13setSDPUseMathEb"},
      {"_ZNK2at7Context19userEnabledFlashSDPEv", "_ZN2at7Context14setSDPUseFlashEb"},
      {"_ZNK2at7Context26userEnabledMemEfficientSDPEv", "_ZN2at7Context21setSDPUseMemEfficientEb"},
      {"_ZNK2at7Context19userEnabledCuDNNSDPEv", "_ZN2at7Context14setSDPUseCuDNNEb"},
      {"_ZNK2at7Context26userEnabledOverrideableSDPEv", "_ZN2at7Context21setSDPUseOverrideableEb"},
  }};
  constexpr const char* kLibrary = "libtorch_cpu.so";
  constexpr const char* kContext = "_ZN2at13globalContextEv";
  const auto lacks = [](const char* name) { return "this PyTorch has no " + std::string(name); };
  Switches found;
  for (std::size_t i = 0; i < kBackends; ++i) {
    found.read[i] = reinterpret_cast<bool (*)(const void*)>(find_loaded(kLibrary, kNames[i].read));
    if (found.read[i] == nullptr) return lacks(kNames[i].read);
    found.write[i] =
        reinterpret_cast<void (*)(const void*, bool)>(find_loaded(kLibrary, kNames[i].write));
    if (found.write[i] == nullptr) return lacks(kNames[i].write);
  }
  const auto context = reinterpret_cast<const void* (*)()>(find_loaded(kLibrary, kContext));
  if (context == nullptr) return lacks(kContext);
  found.context = context();
  switches = found;
  return "";
}

}  // namespace xpuruntime::bindings

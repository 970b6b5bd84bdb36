// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "stream_use.h"

#include <algorithm>
#include <map>
#include <utility>

#include "xpuruntime/dispatcher.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime::ort {
namespace {

struct Users {
  std::mutex mutex;
  std::map<std::pair<int, StreamHandle>, std::size_t> counts;
};

// Never destroyed: sessions may end when the process does.
Users& users() {
  static Users* const made = new Users;
  return *made;
}

}  // namespace

void StreamUse::remember(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  if (std::find(seen_.begin(), seen_.end(), stream) == seen_.end()) {
    seen_.push_back(stream);
    const std::lock_guard all(users().mutex);
    ++users().counts[{device_.index, stream}];
  }
  last_.store(stream, std::memory_order_relaxed);
}

StreamUse::~StreamUse() {
  for (const StreamHandle stream : seen_) {
    {
      const std::lock_guard lock(users().mutex);
      const auto found = users().counts.find({device_.index, stream});
      if (found == users().counts.end() || --found->second != 0) continue;
      users().counts.erase(found);
    }
    Dispatcher::instance().workspaces().retire_stream(device_, stream);
  }
}

}  // namespace xpuruntime::ort

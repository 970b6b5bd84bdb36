// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "dispatch/call_table.h"

#include <algorithm>
#include <utility>

namespace xpuruntime {
namespace {

constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15U;

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * kFactor;
  return hash ^ hash >> 29U;
}

// Of two chains that do not wait for each other.
std::uint64_t hash_of(std::span<const std::uint64_t> key) noexcept {
  std::uint64_t even = key.size();
  std::uint64_t odd = kFactor;
  std::size_t i = 0;
  for (; i + 1 < key.size(); i += 2) {
    even = mixed(even, key[i]);
    odd = mixed(odd, key[i + 1]);
  }
  if (i < key.size()) even = mixed(even, key[i]);
  return mixed(even, odd);
}

}  // namespace

std::size_t CallTable::slot_of(std::span<const std::uint64_t> key,
                               std::uint64_t hash) const noexcept {
  const std::size_t mask = slots_.size() - 1;  // a power of two
  std::size_t at = static_cast<std::size_t>(hash) & mask;
  while (slots_[at].length != 0) {
    const Slot& slot = slots_[at];
    if (slot.hash == hash && slot.length == key.size() &&
        std::equal(key.begin(), key.end(), words_.data() + slot.begin)) {
      break;
    }
    at = (at + 1) & mask;
  }
  return at;
}

const std::uint64_t* CallTable::find(std::span<const std::uint64_t> key) const noexcept {
  if (count_ == 0) return nullptr;
  const Slot& slot = slots_[slot_of(key, hash_of(key))];
  return slot.length == 0 ? nullptr : &slot.word;
}

void CallTable::keep(std::span<const std::uint64_t> key, std::uint64_t word) {
  if (key.empty()) return;
  if (count_ >= kMost) clear();
  if (2 * (count_ + 1) > slots_.size()) grow();
  const std::uint64_t hash = hash_of(key);
  Slot& slot = slots_[slot_of(key, hash)];
  if (slot.length != 0) return;
  const std::size_t begin = words_.size();
  words_.insert(words_.end(), key.begin(), key.end());
  slot = {hash, begin, key.size(), word};
  ++count_;
}

void CallTable::clear() noexcept {
  std::fill(slots_.begin(), slots_.end(), Slot{});
  words_.clear();
  count_ = 0;
}

void CallTable::grow() {
  const std::vector<Slot> before =
      std::exchange(slots_, std::vector<Slot>(std::max<std::size_t>(64, 2 * slots_.size())));
  for (const Slot& slot : before) {
    if (slot.length == 0) continue;
    slots_[slot_of({words_.data() + slot.begin, slot.length}, slot.hash)] = slot;
  }
}

}  // namespace xpuruntime

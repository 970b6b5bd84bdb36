// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace xpuruntime {

/// What is known of calls of one kind, by the words that tell this kind from others. For one thread
/// alone, so that a look-up takes no lock.
class CallTable {
 public:
  /// With one more kind than this, all are forgotten.
  static constexpr std::size_t kMost = 16384;

  bool has(std::span<const std::uint64_t> key) const noexcept { return find(key) != nullptr; }
  /// What is kept with a key, or null; until the table changes.
  const std::uint64_t* find(std::span<const std::uint64_t> key) const noexcept;
  /// Keeps a key, and a word with it. One that is there already is left as it is.
  void keep(std::span<const std::uint64_t> key, std::uint64_t word = 0);
  void clear() noexcept;
  std::size_t size() const noexcept { return count_; }

 private:
  struct Slot {
    std::uint64_t hash = 0;
    std::size_t begin = 0;
    std::size_t length = 0;  // 0: free
    std::uint64_t word = 0;
  };

  /// Where a key is, or where it would be put. There is always a free slot.
  std::size_t slot_of(std::span<const std::uint64_t> key, std::uint64_t hash) const noexcept;
  void grow();

  std::vector<Slot> slots_;
  std::vector<std::uint64_t> words_;
  std::size_t count_ = 0;
};

}  // namespace xpuruntime

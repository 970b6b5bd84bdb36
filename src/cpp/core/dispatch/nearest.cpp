// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "dispatch/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace xpuruntime {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Letters to add, to take out or to change.
std::size_t distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (const char letter : left) {
    std::size_t diagonal = row[0]++;
    for (std::size_t i = 0; i < right.size(); ++i) {
      const std::size_t change = diagonal + (lower(letter) == lower(right[i]) ? 0 : 1);
      diagonal = row[i + 1];
      row[i + 1] = std::min({change, diagonal + 1, row[i] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_word(std::string_view text, const std::vector<std::string>& words) {
  std::string best;
  std::size_t least = std::max<std::size_t>(text.size() / 3, 1) + 1;
  for (const std::string& word : words) {
    const std::size_t apart = distance(text, word);
    if (apart >= least) continue;
    least = apart;
    best = word;
  }
  return best;
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "plugins/plugin_text.h"

#include <algorithm>
#include <cstddef>

namespace xpuruntime {
namespace {

// How many bytes the first character of `text` has; 0 where it is none of UTF-8.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < count) return 0;
  for (std::size_t at = 1; at < count; ++at) {
    if ((byte(at) & 0xC0U) != 0x80) return 0;
  }
  const bool too_long = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool no_number = (first == 0xED && byte(1) > 0x9F) || (first == 0xF4 && byte(1) > 0x8F);
  return too_long || no_number ? 0 : count;
}

}  // namespace

std::string readable_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t count = utf8_length(text);
    out.append(count == 0 ? "?" : text.substr(0, count));
    text.remove_prefix(std::max<std::size_t>(count, 1));
  }
  return out;
}

}  // namespace xpuruntime

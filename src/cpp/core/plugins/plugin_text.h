// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "xpuruntime/kernel_plugin.h"

namespace xpuruntime {

/// The text with '?' for every byte that is not UTF-8: it may have been cut within a character.
std::string readable_text(std::string_view text);

/// Buffer for a text that a plugin writes.
class PluginText {
 public:
  XpuText text() noexcept { return {buffer_.data(), buffer_.size()}; }
  std::string str(const char* otherwise) {
    buffer_.back() = '\0';
    return buffer_.front() == '\0' ? otherwise : readable_text(buffer_.data());
  }
  /// Whether the text may have been cut.
  bool full() const noexcept { return std::strlen(buffer_.data()) + 1 == buffer_.size(); }

 private:
  std::array<char, 512> buffer_{};
};

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace xpuruntime {

/// The word that differs from `text` in the fewest letters, case aside; empty when none is close.
std::string nearest_word(std::string_view text, const std::vector<std::string>& words);

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/types.h"

#include <charconv>

#include "xpuruntime/error.h"

namespace xpuruntime {

std::string to_string(DeviceId device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

DeviceId parse_device(std::string_view text) {
  if (text == "cpu") return {DeviceType::kCpu, 0};
  if (text == "cuda") return {DeviceType::kCuda, 0};
  constexpr std::string_view prefix = "cuda:";
  if (text.starts_with(prefix)) {
    const std::string_view digits = text.substr(prefix.size());
    int index = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc{} && end == digits.data() + digits.size() && index >= 0) {
      return {DeviceType::kCuda, index};
    }
  }
  throw InputError("device '" + std::string(text) +
                   "' is not known: the core runs on 'cpu', 'cuda' (the same as 'cuda:0') and "
                   "'cuda:N' with N = 0, 1, ...");
}

}  // namespace xpuruntime

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/plan_name.h"

#include "xpuruntime/error.h"

namespace xpuruntime::cudnn {
namespace {

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool take_number(std::string_view& text) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  text.remove_prefix(digits);
  return digits > 0;
}

bool is_plan_name(std::string_view text) {
  if (!take(text, "eng") || !take_number(text)) return false;
  while (take(text, "_k")) {
    if (!take_number(text) || !take(text, "=")) return false;
    (void)take(text, "-");
    if (!take_number(text)) return false;
  }
  return text.empty();
}

}  // namespace

std::string check_plan_name(std::string_view text) {
  if (is_plan_name(text)) return std::string(text);
  throw InputError("'" + std::string(text) +
                   "' is not a plan of cuDNN: expected its engine and knobs, such as "
                   "'eng4_k2=1_k3=0', as a kernel says it in `config`");
}

}  // namespace xpuruntime::cudnn

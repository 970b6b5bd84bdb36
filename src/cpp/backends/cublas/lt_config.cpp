// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/lt_config.h"

#include <charconv>
#include <set>

#include "xpuruntime/error.h"

namespace xpuruntime::cublas {
namespace {

constexpr std::string_view kExample =
    "algo=66,tile=21,stages=31,splitk=1,reduction=0,swizzle=0,custom=0,inner=0,cluster=2,workspace="
    "0";

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw InputError("the configuration '" + std::string(text) +
                   "' of cublas.cublasLt cannot be read: " + why + "; one looks like " +
                   std::string(kExample));
}

template <typename Config, typename Visit>
void visit_fields(Config& config, Visit visit) {
  visit("algo", config.algo);
  visit("tile", config.tile);
  visit("stages", config.stages);
  visit("splitk", config.splitk);
  visit("reduction", config.reduction);
  visit("swizzle", config.swizzle);
  visit("custom", config.custom);
  visit("inner", config.inner);
  visit("cluster", config.cluster);
  visit("workspace", config.workspace);
}

}  // namespace

std::string to_string(const LtConfig& config) {
  std::string text;
  visit_fields(config, [&](std::string_view name, const auto& value) {
    text.append(text.empty() ? "" : ",").append(name).append("=").append(std::to_string(value));
  });
  return text;
}

LtConfig parse_lt_config(std::string_view text) {
  LtConfig config;
  std::set<std::string_view> seen;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (comma != std::string_view::npos && rest.empty()) refuse(text, "it ends with a comma");
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      refuse(text, "'" + std::string(item) + "' is no name=number");
    }
    const std::string_view name = item.substr(0, equals);
    const std::string_view number = item.substr(equals + 1);
    if (!seen.insert(name).second) refuse(text, "'" + std::string(name) + "' is given twice");
    bool known = false;
    visit_fields(config, [&](std::string_view field, auto& value) {
      if (field != name) return;
      known = true;
      // NOLINTBEGIN(bugprone-suspicious-stringview-data-usage): the end is given too
      const char* const first = number.data();
      const auto [end, error] = std::from_chars(first, first + number.size(), value);
      // NOLINTEND(bugprone-suspicious-stringview-data-usage)
      if (error != std::errc() || end != first + number.size()) {
        refuse(text, "'" + std::string(number) + "' is no value for '" + std::string(name) + "'");
      }
    });
    if (!known) refuse(text, "'" + std::string(name) + "' is not known");
  }
  if (!seen.contains("algo")) refuse(text, "'algo' is missing");
  return config;
}

}  // namespace xpuruntime::cublas

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/paired_comparison.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

constexpr double kGrowth = 4.0 / 3.0;  // of one look to the next

// The chance of at least `count` heads of `rounds` fair coins.
double upper_tail(std::size_t rounds, std::size_t count) {
  double term = std::exp2(-static_cast<double>(rounds));  // all of them heads
  double sum = 0;
  for (std::size_t heads = rounds; heads + 1 > count; --heads) {
    sum += term;
    if (heads == 0) break;
    term *= static_cast<double>(heads) / static_cast<double>(rounds - heads + 1);
  }
  return std::min(sum, 1.0);
}

double median(std::vector<double> values) {
  const std::size_t middle = values.size() / 2;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(middle);
  std::nth_element(values.begin(), at, values.end());
  if (values.size() % 2 == 1) return *at;
  return (*at + *std::max_element(values.begin(), at)) / 2;
}

std::vector<double> log_ratios(std::span<const double> times, std::span<const double> control) {
  if (times.size() != control.size() || times.empty()) {
    throw InputError("paired times come from the same rounds, not from " +
                     std::to_string(times.size()) + " and " + std::to_string(control.size()));
  }
  std::vector<double> logs(times.size());
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (!(times[i] > 0 && control[i] > 0 && std::isfinite(times[i]) && std::isfinite(control[i]))) {
      throw InputError("times must be finite and above zero");
    }
    logs[i] = std::log(times[i]) - std::log(control[i]);
  }
  return logs;
}

std::vector<std::size_t> growing_rounds(std::size_t first, std::size_t last) {
  std::vector<std::size_t> looks{std::min(first, last)};
  while (looks.back() < last) {
    const auto later =
        static_cast<std::size_t>(std::ceil(static_cast<double>(looks.back()) * kGrowth));
    looks.push_back(static_cast<double>(later) * 1.1 < static_cast<double>(last) ? later : last);
  }
  return looks;
}

}  // namespace

double Margin::of(double control_us) const noexcept {
  return std::max(relative, absolute_us / control_us);
}

std::string_view to_string(Verdict verdict) noexcept {
  constexpr std::array<std::string_view, 4> names{"faster", "slower", "tied", "inconclusive"};
  return names[static_cast<std::size_t>(verdict)];
}

PairedComparison compare_paired(std::span<const double> times, std::span<const double> control,
                                std::span<const double> twin, const Margin& margin,
                                const PairedOptions& options) {
  std::vector<double> logs = log_ratios(times, control);
  const std::vector<double> again = log_ratios(twin, control);
  for (std::size_t i = 0; i < logs.size(); ++i) logs[i] -= again[i] / 2;

  PairedComparison found;
  found.rounds = logs.size();
  const double split = std::fabs(median(again));
  const double stated = margin.of(median({control.begin(), control.end()}));
  found.margin = std::max(stated, std::expm1(2 * split));
  const double up = std::log1p(found.margin);
  const double down = -up;
  const double same = std::log1p(stated) - (found.margin > stated ? split : 0);
  const double level = (1 - options.confidence) / static_cast<double>(options.family);
  const auto agree = [&](auto&& which) {
    const auto count = static_cast<std::size_t>(std::count_if(logs.begin(), logs.end(), which));
    const double p = static_cast<double>(options.looks) * upper_tail(logs.size(), count);
    return p <= level;
  };

  std::sort(logs.begin(), logs.end());
  // The largest rank whose order statistic is below the median with enough confidence.
  std::size_t rank = 0;
  while (2 * (rank + 1) <= logs.size() &&
         upper_tail(logs.size(), logs.size() - rank) <= (1 - options.confidence) / 2) {
    ++rank;
  }
  const double low = logs[rank == 0 ? 0 : rank - 1];
  const double high = logs[logs.size() - (rank == 0 ? 1 : rank)];
  found.ratio = std::exp(median(logs));
  found.low = std::exp(low);
  found.high = std::exp(high);

  const bool faster = high < down && agree([&](double one) { return one < down; });
  const bool slower = low > up && agree([&](double one) { return one > up; });
  const bool within = high < same && agree([&](double one) { return one < same; });
  found.not_faster = low > -same && agree([&](double one) { return one > -same; });
  if (faster) {
    found.verdict = Verdict::kFaster;
  } else if (slower) {
    found.verdict = Verdict::kSlower;
  } else if (within && found.not_faster) {
    found.verdict = Verdict::kTied;
  }
  return found;
}

std::vector<std::size_t> look_rounds(std::size_t first, std::size_t last, double confidence,
                                     std::size_t family) {
  std::vector<std::size_t> found;
  while (true) {
    std::size_t begin = first;
    if (!found.empty()) {
      const auto looks = static_cast<double>(found.size() + 1);
      const double least =
          std::ceil(std::log2(looks * static_cast<double>(family) / (1 - confidence)));
      begin = std::max(first, static_cast<std::size_t>(std::max(least, 1.0)));
    }
    std::vector<std::size_t> looks = growing_rounds(begin, last);
    if (looks.size() <= found.size() || looks == found) return looks;
    found = std::move(looks);
  }
}

}  // namespace xpuruntime

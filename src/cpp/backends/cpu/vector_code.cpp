// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/vector_code.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/finish_rows.h"
#include "cpu/norm_rows.h"
#include "cpu_facts.h"

// One function of each kind for one instruction set.
// NOLINTBEGIN(bugprone-macro-parentheses): names and attributes take none.
#define XPURUNTIME_VECTOR_CODE(set, lanes, attribute)                                      \
  template <typename T>                                                                    \
  attribute void norm_##set(const NormRows& at, std::int64_t first, std::int64_t last,     \
                            float* scratch) {                                              \
    norm_rows<lanes, T>(at, first, last, scratch);                                         \
  }                                                                                        \
  template <typename T>                                                                    \
  attribute void norm_backward_##set(const NormBackwardRows& at, std::int64_t first,       \
                                     std::int64_t last, float* scratch, float* sums) {     \
    norm_backward_rows<lanes, T>(at, first, last, scratch, sums);                          \
  }                                                                                        \
  attribute void finish_##set(const FinishRows& at) { finish_rows<lanes>(at); }            \
  const VectorCode code_##set{                                                             \
      #set,                                                                                \
      {norm_##set<float>, norm_##set<Half>, norm_##set<Brain>},                            \
      {norm_backward_##set<float>, norm_backward_##set<Half>, norm_backward_##set<Brain>}, \
      finish_##set};
// NOLINTEND(bugprone-macro-parentheses)

namespace xpuruntime::cpu {
namespace {

#ifdef __x86_64__
XPURUNTIME_VECTOR_CODE(avx512, 16,
                       __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
XPURUNTIME_VECTOR_CODE(avx2, 8, __attribute__((target("avx2,fma"))))
#endif
XPURUNTIME_VECTOR_CODE(baseline, 4, )

std::vector<std::string_view> needs(const VectorCode& code) {
  const std::string_view set = code.instructions;
  if (set == "avx512") return {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"};
  if (set == "avx2") return {"avx2", "fma"};
  return {};
}

}  // namespace

VectorCodes all_vector_code() noexcept {
#ifdef __x86_64__
  return {{&code_avx512, &code_avx2, &code_baseline}, 3};
#else
  return {{&code_baseline}, 1};
#endif
}

bool can_run(const VectorCode& code) {
  const std::vector<std::string> has = features();
  const std::vector<std::string_view> needed = needs(code);
  return std::all_of(needed.begin(), needed.end(), [&](std::string_view feature) {
    return std::find(has.begin(), has.end(), feature) != has.end();
  });
}

const VectorCode& vector_code() {
  static const VectorCode* const best = [] {
    const VectorCodes codes = all_vector_code();
    int i = 0;
    while (!can_run(*codes.code[i])) ++i;
    return codes.code[i];
  }();
  return *best;
}

}  // namespace xpuruntime::cpu

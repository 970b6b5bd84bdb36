// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// A program that has only the installed package: it includes every header, allocates from a pool
// and multiplies two matrices.
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>

// All installed headers.
#include "all_headers.h"

using namespace xpuruntime;

namespace {

Operand matrix(const char* name, float* data, std::int64_t rows, std::int64_t columns) {
  Operand operand;
  operand.name = name;
  operand.absent = false;
  operand.dtype = {2, 32, 1};
  operand.data = data;
  operand.rank = 2;
  operand.shape[0] = rows;
  operand.shape[1] = columns;
  set_dense_strides(operand);
  return operand;
}

}  // namespace

int main() {
  const auto pool =
      make_caching_pool("caching", make_host_resource(), {.name = "consumer", .limit = {}});
  const Buffer buffer = pool->allocate(3 * 4 * sizeof(float));
  auto* const a = static_cast<float*>(buffer.data());
  float* const b = a + 4;
  float* const out = b + 4;
  const std::array<float, 4> left{1, 2, 3, 4};
  const std::array<float, 4> right{1, 0, 0, 1};
  std::memcpy(a, left.data(), sizeof left);
  std::memcpy(b, right.data(), sizeof right);
  OpCall call = make_matmul({matrix("a", a, 2, 2), matrix("b", b, 2, 2), {}, {}, {}}, {});
  call.set(slots::Matmul::kOut, matrix("out", out, 2, 2));
  CallSite site(Dispatcher::instance(), std::make_shared<const KernelRules>(), {}, {},
                {"cpu.reference"});
  site.run(call.desc, call.data.data(), 0);
  if (std::memcmp(out, left.data(), sizeof left) != 0) return 1;
  std::puts("consumer: right");
  return 0;
}

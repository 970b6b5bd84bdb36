// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// A library of kernels with one thing wrong, which -D says; without any, its kernels work or fail
// as their names say. With ABI1 it is built against version 1 of the header, as it was published.
#include <cstdint>
#include <cstdio>
#include <cstring>

#ifdef ABI1
#include "kernel_plugin_abi1.h"
#define OPERAND(op, index) (&(op)->operands[index])
#else
#include "xpuruntime/kernel_plugin.h"
#define OPERAND(op, index) ((op)->operands[index])
#endif

#ifndef BACKEND
#define BACKEND "faulty"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

void write(XpuText into, const char* sentence) {
  (void)std::snprintf(into.text, into.size, "%s", sentence);
}

std::int32_t yes(const XpuOpDescription* op, XpuText reason) {
  if (op->size != sizeof(XpuOpDescription) || op->op != XPU_MATMUL || op->operand_count != 6) {
    write(reason, "the description is wrong");
    return 0;
  }
  return 1;
}
std::int32_t no(const XpuOpDescription*, XpuText) { return 0; }
// Fills all there is, so that it is cut within a character.
std::int32_t long_winded(const XpuOpDescription*, XpuText reason) {
  static const char kUmlaut[] = "\xC3\xA4";
  for (std::size_t at = 0; at < reason.size; ++at) reason.text[at] = kUmlaut[at % 2];
  return 0;
}

struct Work {
  std::int64_t elements;
};
constexpr std::size_t kScratch = 10000;

void* prepare(const XpuOpDescription* op, std::size_t* workspace, XpuText) {
  *workspace = kScratch;
  return new Work{OPERAND(op, 5)->shape[0] * OPERAND(op, 5)->shape[1]};
}
void* unprepared(const XpuOpDescription*, std::size_t*, XpuText error) {
  write(error, "the moon is wrong");
  return nullptr;
}
void* unprepared_silent(const XpuOpDescription*, std::size_t*, XpuText) { return nullptr; }

// Writes through all of its scratch memory, and back.
std::int32_t ones(void* prepared, void* const* operands, void* workspace, void* stream,
                  XpuText error) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0 || stream != nullptr ||
      operands[2] != nullptr) {
    write(error, "the arguments are wrong");
    return 1;
  }
  const auto& work = *static_cast<const Work*>(prepared);
  auto* const scratch = static_cast<unsigned char*>(workspace);
  std::memset(scratch, 1, kScratch);
  float* const out = static_cast<float*>(operands[5]);
  for (std::int64_t i = 0; i < work.elements; ++i) out[i] = scratch[i % kScratch];
  return 0;
}
std::int32_t fails(void*, void* const*, void*, void*, XpuText error) {
  write(error, "the sun is wrong");
  return 7;
}
std::int32_t fails_silent(void*, void* const*, void*, void*, XpuText) { return -3; }

void destroy(void* prepared) { delete static_cast<Work*>(prepared); }

#ifdef GROWN
struct Kernel {
  XpuKernel known;
  const char* later;
};
#define MORE(text) , text
#else
struct Kernel {
  XpuKernel known;
};
#define MORE(text)
#endif

#ifdef ABI1
#define SINCE_2
#else
#define SINCE_2 , 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr
#endif

#define KERNEL(name, supports, prepare, launch)                                                   \
  {{sizeof(Kernel), BACKEND "." name, XPU_MATMUL, XPU_CPU, "for tests", "none", "1", 1, supports, \
    prepare, launch, destroy SINCE_2} MORE("later")}

Kernel kernels[] = {
    KERNEL("ones", yes, prepare, ones),
    KERNEL("silent", no, prepare, ones),
    KERNEL("long_winded", long_winded, prepare, ones),
    KERNEL("unprepared", yes, unprepared, ones),
    KERNEL("unprepared_silent", yes, unprepared_silent, ones),
    KERNEL("fails", yes, prepare, fails),
    KERNEL("fails_silent", yes, prepare, fails_silent),
};

}  // namespace

#ifdef NO_ENTRY
#define ENTRY other_kernels
#else
#define ENTRY xpuruntime_kernels
#endif

EXPORT const XpuKernel* ENTRY(std::uint32_t abi, std::size_t* count) {
#ifdef OTHER_ABI
  if (abi != XPURUNTIME_KERNEL_ABI + 1) return nullptr;
#endif
#ifdef STRICT
  if (abi != XPURUNTIME_KERNEL_ABI) return nullptr;
#endif
  if (abi == 0) return nullptr;
  *count = sizeof(kernels) / sizeof(kernels[0]);
  XpuKernel& second = kernels[1].known;
#ifdef NO_KERNELS
  *count = 0;
#elif defined(SMALL)
  kernels[0].known.size = 8;
#elif defined(OTHER_SIZE)
  second.size += 8;
#elif defined(NO_TEXT)
  second.limits = nullptr;
#elif defined(EMPTY_TEXT)
  second.version = "";
#elif defined(NO_FUNCTION)
  second.destroy = nullptr;
#elif defined(OTHER_OP)
  second.op = 99;
#elif defined(OTHER_DEVICE)
  second.device_type = 7;
#elif defined(ODD_ID)
  second.id = BACKEND ".two words";
#elif defined(TWICE)
  second.id = BACKEND ".ones";
#elif defined(TWO_BACKENDS)
  second.id = "other.silent";
#elif defined(TWO_TYPES)
  second.device_type = XPU_CUDA;
#elif defined(TWO_VERSIONS)
  second.version = "2";
#elif defined(NOT_UTF8)
  second.description = "caf\xE9";
#elif defined(NO_FAMILIES)
  second.family_count = 2;
#elif defined(NO_FAMILY)
  static const char* const families[] = {nullptr};
  second.family_count = 1;
  second.families = families;
#elif defined(OTHER_FAMILY)
  static const char* const families[] = {"cpu", "flash_v2"};
  second.family_count = 2;
  second.families = families;
#elif defined(NO_PREPARE_CONFIG)
  second.config = [](const XpuOpDescription*, std::uint32_t, XpuText) { return 0; };
#elif defined(TWO_AVAILABLE)
  second.available = [](XpuText) { return 1; };
#endif
  (void)second;
  return &kernels[0].known;
}

#ifdef UNRESOLVED
extern "C" int nobody_has_this();
EXPORT int call_nobody() { return nobody_has_this(); }
#endif

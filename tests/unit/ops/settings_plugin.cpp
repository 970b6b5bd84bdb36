// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// Kernels that write what they are told about a call into their output, against the header's
// current version, or with ABI1 against version 1 as it was published.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifdef ABI1
#include "kernel_plugin_abi1.h"
#define OPERAND(op, index) (&(op)->operands[index])
#else
#include "xpuruntime/kernel_plugin.h"
#define OPERAND(op, index) ((op)->operands[index])
#endif

namespace {

struct Prepared {
  double value;
  std::int64_t elements;
  int bits;
  int config;
};

std::int32_t norm_supports(const XpuOpDescription* op, XpuText) {
  return op->size == sizeof(XpuOpDescription) && op->operand_count == 8;
}

void* prepare_norm(const XpuOpDescription* op, std::size_t*, XpuText) {
  const XpuTensor& y = *OPERAND(op, 4);
  return new Prepared{static_cast<double>(op->epsilon), y.shape[0] * y.shape[1], y.bits, 0};
}

// Folds every number of a convolution, so that a field in the wrong place shows.
double fold(const XpuOpDescription* op) {
  double sum = 0;
  double weight = 1;
  const auto add = [&](double value) { sum += weight * value, weight *= 1.25; };
  for (const int operand : {0, 1, 3}) {
    const XpuTensor& tensor = *OPERAND(op, operand);
    for (int i = 0; i < tensor.rank; ++i) {
      add(static_cast<double>(tensor.shape[i]));
      add(static_cast<double>(tensor.strides[i]));
    }
  }
  add(op->groups);
  for (int i = 0; i < 2; ++i) add(op->stride[i]);
  for (int i = 0; i < 2; ++i) add(op->dilation[i]);
  for (int i = 0; i < 4; ++i) add(op->padding[i]);
  return sum;
}

std::int32_t conv_supports(const XpuOpDescription* op, XpuText) {
#ifndef ABI1
  if (op->spatial_rank != 2 || op->operands[2] != nullptr) return 0;
#endif
  return op->operand_count == 4;
}

void* prepare_conv(const XpuOpDescription* op, std::size_t*, XpuText) {
  const XpuTensor& out = *OPERAND(op, 3);
  return new Prepared{fold(op), out.shape[0] * out.shape[1] * out.shape[2] * out.shape[3], out.bits,
                      0};
}

void fill(const Prepared& work, void* out) {
  for (std::int64_t i = 0; i < work.elements; ++i) {
    if (work.bits == 64) {
      static_cast<double*>(out)[i] = work.value + work.config;
    } else {
      static_cast<float*>(out)[i] = static_cast<float>(work.value + work.config);
    }
  }
}
std::int32_t launch_norm(void* prepared, void* const* operands, void*, void*, XpuText) {
  fill(*static_cast<const Prepared*>(prepared), operands[4]);
  return 0;
}
std::int32_t launch_conv(void* prepared, void* const* operands, void*, void*, XpuText) {
  fill(*static_cast<const Prepared*>(prepared), operands[3]);
  return 0;
}
void destroy(void* prepared) { delete static_cast<Prepared*>(prepared); }

#ifdef ABI1
#define SINCE_2
#define SINCE_2_CONV
#else
const char* const kFamilies[] = {"cpu", "torch"};
const char* const kConfigs[] = {"add=1", "add=2", "add=3"};

std::int32_t available(XpuText reason) {
#ifdef MISSING
  (void)std::snprintf(reason.text, reason.size, "libsettings.so is missing: install it");
  return 0;
#else
  (void)reason;
  return 1;
#endif
}
std::int32_t config(const XpuOpDescription*, std::uint32_t index, XpuText text) {
  if (index >= 3) return 0;
#ifdef ODD_CONFIG
  (void)std::snprintf(text.text, text.size, "two words");
#else
  (void)std::snprintf(text.text, text.size, "%s", kConfigs[index]);
#endif
  return 1;
}
void* prepare_config(const XpuOpDescription* op, const char* config, std::size_t* workspace,
                     XpuText error) {
  if (std::strncmp(config, "add=", 4) != 0) {
    (void)std::snprintf(error.text, error.size, "it knows add=1 to add=3");
    return nullptr;
  }
  auto* const made = static_cast<Prepared*>(prepare_norm(op, workspace, error));
  made->config = std::atoi(config + 4);
  return made;
}
void chosen_config(const void* prepared, XpuText text) {
  (void)std::snprintf(text.text, text.size, "add=%d",
                      static_cast<const Prepared*>(prepared)->config);
}
std::int32_t favoured(const XpuOpDescription*, XpuText reason) {
  (void)std::snprintf(reason.text, reason.size, "it is slow for this");
  return 0;
}
#ifndef EXPLICIT_ONLY
#define EXPLICIT_ONLY 1
#endif
#define SINCE_2 \
  , EXPLICIT_ONLY, 2, kFamilies, available, favoured, config, prepare_config, chosen_config
#define SINCE_2_CONV , 1, 0, nullptr, available, nullptr, nullptr, nullptr, nullptr
#endif

const XpuKernel kKernels[] = {
    {sizeof(XpuKernel), "settings.rms_norm", XPU_RMS_NORM, XPU_CPU, "for tests", "none", "1", 1,
     norm_supports, prepare_norm, launch_norm, destroy SINCE_2},
    {sizeof(XpuKernel), "settings.conv", XPU_CONV, XPU_CPU, "for tests", "none", "1", 1,
     conv_supports, prepare_conv, launch_conv, destroy SINCE_2_CONV},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const XpuKernel* xpuruntime_kernels(
    std::uint32_t abi, std::size_t* count) {
  if (abi != XPURUNTIME_KERNEL_ABI) return nullptr;
  *count = sizeof(kKernels) / sizeof(kKernels[0]);
  return kKernels;
}

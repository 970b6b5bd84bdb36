/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The xpuruntime developers */
/* What the library of NVIDIA's driver exports, for two GPUs whose counters are read from files beside it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} Pci;

static const unsigned kBus[] = {0x17, 0xca};
static int opened;

static unsigned index_of(void* gpu) { return (unsigned)((size_t)gpu - 1); }

int nvmlInit_v2(void) { return ++opened, getenv("NVML_BROKEN") ? 9 : 0; }
int nvmlShutdown(void) { return --opened, 0; }
int opened_times(void) { return opened; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) { return *gpu = (void*)((size_t)index + 1), 0; }
int nvmlDeviceGetPciInfo_v3(void* gpu, Pci* pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = kBus[index_of(gpu)];
  snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* gpu, unsigned long long* used) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%u", getenv("NVML_COUNTERS"), index_of(gpu));
  FILE* file = fopen(path, "r");
  if (!file) return 3; /* not supported */
  const int found = fscanf(file, "%llu", used);
  fclose(file);
  return found == 1 ? 0 : 999;
}
int nvmlDeviceGetClockInfo(void* gpu, int kind, unsigned* mhz) { return *mhz = 900 + 10 * index_of(gpu) + kind, 0; }
int nvmlDeviceGetMaxClockInfo(void* gpu, int kind, unsigned* mhz) { return *mhz = 1980, 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* gpu, unsigned long long* bits) {
  return *bits = index_of(gpu) ? 0x4 | 0x1 : 0, 0;
}

// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
//
// A library with NCCL's interface that fails and stalls when it is told to, which the real one
// cannot be made to do without GPUs. One rank, host memory: what it moves is of no interest.
// FAULT: "none", "refuse", "stall", "late_error", "abort_stalls", "finalize_stalls".
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
enum : int { kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7 };

struct UniqueId {
  char internal[128];
};

struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas;
};

struct Comm {
  bool blocking;
  int error = kSuccess;
  Clock::time_point ready;
};

int calls = 0, groups = 0, aborted = 0, destroyed = 0;

bool fault(const char* name) {
  const char* const told = std::getenv("FAULT");
  return told != nullptr && std::strcmp(told, name) == 0;
}

int start(Comm* comm, std::chrono::milliseconds takes) {
  comm->ready = Clock::now() + takes;
  return comm->blocking ? kSuccess : kInProgress;
}

int call(Comm* comm) {
  ++calls;
  if (fault("refuse")) return comm->error = kInvalidUsage;
  if (fault("late_error")) comm->error = kRemoteError;
  return start(comm, std::chrono::milliseconds(fault("stall") ? 60'000 : 5));
}

int copy(const void* from, void* to, std::size_t bytes, Comm* comm) {
  if (to != nullptr) std::memmove(to, from, bytes);
  return call(comm);
}

std::size_t itemsize(int dtype) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[dtype];
}

}  // namespace

extern "C" {

int faulty_calls() { return calls; }
int faulty_groups() { return groups; }
int faulty_aborted() { return aborted; }
int faulty_destroyed() { return destroyed; }

const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "invalid usage";
}
const char* ncclGetLastError(void*) { return "what was said last"; }
int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
int ncclGetUniqueId(UniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = static_cast<char>(i);
  return kSuccess;
}

int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, Config* config) {
  for (int i = 0; i < 128; ++i) {
    if (id.internal[i] != static_cast<char>(i)) return kInvalidUsage;
  }
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || rank >= ranks) {
    return kInvalidUsage;
  }
  *comm = new Comm{config->blocking == 1, kSuccess, {}};
  return start(*comm, std::chrono::milliseconds(20));
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = Clock::now() < comm->ready ? kInProgress : comm->error;
  return kSuccess;
}
int ncclCommFinalize(Comm* comm) {
  return start(comm, std::chrono::milliseconds(fault("finalize_stalls") ? 60'000 : 5));
}
int ncclCommDestroy(Comm* comm) {
  ++destroyed;
  delete comm;
  return kSuccess;
}
int ncclCommAbort(Comm* comm) {
  ++aborted;
  if (fault("abort_stalls")) std::this_thread::sleep_for(std::chrono::minutes(1));
  delete comm;
  return kSuccess;
}
int ncclCommCount(Comm*, int* count) {
  *count = 1;
  return kSuccess;
}
int ncclCommUserRank(Comm*, int* rank) {
  *rank = 0;
  return kSuccess;
}

int ncclGroupStart() {
  ++groups;
  return kSuccess;
}
int ncclGroupEnd() { return kInProgress; }

int ncclAllReduce(const void* x, void* y, std::size_t n, int dtype, int, Comm* comm, void*) {
  return copy(x, y, n * itemsize(dtype), comm);
}
int ncclReduceScatter(const void* x, void* y, std::size_t n, int dtype, int, Comm* comm, void*) {
  return copy(x, y, n * itemsize(dtype), comm);
}
int ncclReduce(const void* x, void* y, std::size_t n, int dtype, int, int, Comm* comm, void*) {
  return copy(x, y, n * itemsize(dtype), comm);
}
int ncclAllGather(const void* x, void* y, std::size_t n, int dtype, Comm* comm, void*) {
  return copy(x, y, n * itemsize(dtype), comm);
}
int ncclBroadcast(const void* x, void* y, std::size_t n, int dtype, int, Comm* comm, void*) {
  return copy(x, y, n * itemsize(dtype), comm);
}
int ncclSend(const void*, std::size_t, int, int, Comm* comm, void*) { return call(comm); }
int ncclRecv(void*, std::size_t, int, int, Comm* comm, void*) { return call(comm); }
}

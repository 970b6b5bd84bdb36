// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "tracing/device_activity.h"

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>

#include "cuda/driver_function.h"
#include "cuda_api.h"
#include "cupti/library.h"
#include "cupti/records.h"
#include "xpuruntime/error.h"

namespace xpuruntime::activity {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::size_t kAlignment = 8;

constexpr std::array kKinds{
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
    CUPTI_ACTIVITY_KIND_MEMCPY,
    CUPTI_ACTIVITY_KIND_MEMCPY2,
    CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_SYNCHRONIZATION,
    CUPTI_ACTIVITY_KIND_MEMORY2,
    CUPTI_ACTIVITY_KIND_RUNTIME,
    CUPTI_ACTIVITY_KIND_DRIVER,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
};

// What CUPTI's threads write to. Kept after a recording, as a late buffer may still come.
struct Current {
  std::mutex mutex;
  std::shared_ptr<Records> records;
};

Current& current() {
  static auto* const made = new Current;
  return *made;
}

std::shared_ptr<Records> records() {
  const std::lock_guard lock(current().mutex);
  return current().records;
}

void set_records(std::shared_ptr<Records> next) {
  const std::lock_guard lock(current().mutex);
  current().records = std::move(next);
}

CUpti_SubscriberHandle subscriber = nullptr;

// CUPTI leaves the process where a call of CUDA's ends; anywhere else another thread may be in it.
std::atomic<bool> leaving{false};

void CUPTIAPI on_call(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
  if (static_cast<const CUpti_CallbackData*>(data)->callbackSite == CUPTI_API_EXIT &&
      leaving.exchange(false)) {
    (void)Library::get().finalize();
  }
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, kBufferBytes));
  *bytes = *buffer == nullptr ? 0 : kBufferBytes;
  *most = 0;  // as many records as go in
}

void CUPTIAPI take_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer,
                          std::size_t, std::size_t valid) {
  if (const auto into = records()) {
    try {
      into->read(buffer, valid);
      std::size_t dropped = 0;
      if (Library::get().dropped_records(context, stream, &dropped) == CUPTI_SUCCESS) {
        into->lose(dropped);
      }
    } catch (const std::exception&) {  // out of memory: CUPTI's code cannot be passed through
    }
  }
  std::free(buffer);
}

std::uint64_t CUPTIAPI clock_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

std::string refused(const Library& library, const char* call, CUptiResult status) {
  const std::string said = std::string(call) + " failed: " + library.describe(status);
  switch (status) {
    case CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
      return "another tool of this process has CUPTI, such as PyTorch's profiler, Nsight Systems "
             "or "
             "Nsight Compute, and it serves one at a time: end that one first (" +
             said + ")";
    case CUPTI_ERROR_INSUFFICIENT_PRIVILEGES:
    case CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES:
      return "this user may not trace the device: let the administrator set "
             "NVreg_RestrictProfilingToAdminUsers=0 for the driver, or start the container with "
             "CAP_SYS_ADMIN (" +
             said + ")";
    default:
      return said;
  }
}

// Waits for the devices that this process has a context on; makes none on others. Whether there was
// any.
bool wait_for_devices() {
  using GetState = int(int, unsigned*, int*);
  auto* const state_of = cuda::driver_function<GetState>("cuDevicePrimaryCtxGetState");
  std::string none;
  const std::size_t count = cuda::enumerate(none).size();
  bool any = false;
  for (int device = 0; device < static_cast<int>(count); ++device) {
    unsigned flags = 0;
    int active = 0;
    if (state_of(device, &flags, &active) == 0 && active != 0) {
      cuda::synchronize(device);
      any = true;
    }
  }
  return any;
}

void switch_off(const Library& library, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) (void)library.disable(kKinds[i]);
  (void)library.unsubscribe(subscriber);
  subscriber = nullptr;
}

// Takes CUPTI out of the process, so that calls of CUDA's cost what they did before. Whether it is;
// any call of CUPTI's would bring it back.
bool leave_process(const Library& library) noexcept {
  leaving.store(true);
  try {
    if (library.enable_domain(1, subscriber, CUPTI_CB_DOMAIN_RUNTIME_API) == CUPTI_SUCCESS) {
      wait_for_devices();
    }
  } catch (const std::exception&) {  // said by the wait before
  }
  return !leaving.exchange(false);
}

}  // namespace

std::string start(std::size_t limit) {
  const Library* library = nullptr;
  try {
    library = &Library::get();
  } catch (const UnsupportedOperationError& error) {
    return error.what();
  }
  CUptiResult status = library->subscribe(&subscriber, &on_call, nullptr);
  if (status != CUPTI_SUCCESS) return refused(*library, "cuptiSubscribe", status);
  set_records(std::make_shared<Records>(*library, limit));
  const auto fail = [&](const char* call, std::size_t enabled) {
    switch_off(*library, enabled);
    set_records(nullptr);
    return refused(*library, call, status);
  };
  status = library->register_clock(&clock_ns);
  if (status != CUPTI_SUCCESS) return fail("cuptiActivityRegisterTimestampCallback", 0);
  status = library->register_callbacks(&give_buffer, &take_buffer);
  if (status != CUPTI_SUCCESS) return fail("cuptiActivityRegisterCallbacks", 0);
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    status = library->enable(kKinds[i]);
    if (status != CUPTI_SUCCESS) return fail("cuptiActivityEnable", i);
  }
  return {};
}

Collected stop() {
  const Library& library = Library::get();
  std::exception_ptr failure;
  bool used = false;
  try {
    used = wait_for_devices();
  } catch (const CudaError&) {
    failure = std::current_exception();
  }
  (void)library.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  for (const CUpti_ActivityKind kind : kKinds) (void)library.disable(kind);
  if (used && leave_process(library)) {
    subscriber = nullptr;
  } else {
    switch_off(library, 0);
  }
  const std::shared_ptr<Records> collected = records();
  set_records(nullptr);
  if (failure) std::rethrow_exception(failure);
  return collected->take();
}

void enter(std::uint64_t id) noexcept {
  (void)Library::get().push_id(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, id);
}

void leave() noexcept {
  std::uint64_t id = 0;
  (void)Library::get().pop_id(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &id);
}

void show(const char* name) noexcept { (void)nvtxRangePushA(name); }
void hide() noexcept { (void)nvtxRangePop(); }

}  // namespace xpuruntime::activity

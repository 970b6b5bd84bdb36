// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <array>
#include <condition_variable>
#include <functional>
#include <thread>
#include <utility>

#include "cuda_api.h"
#include "streams/stream_calls.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/profiler.h"
#include "xpuruntime/workspaces.h"

namespace xpuruntime {

struct CallSite::Entry {
  OpDesc op;
  std::size_t hash = 0;
  std::shared_ptr<const Choice> choice;
  std::atomic<std::uint64_t> epoch{0};  // of the log that it stands in
};

namespace {

// Whether somebody reads, counted by threads in several places, so that they do not get into each
// other's way.
class Readers {
 public:
  static constexpr std::size_t kShards = 16;
  std::atomic<std::uint32_t>& mine() noexcept {
    static std::atomic<std::uint32_t> threads{0};
    thread_local const std::uint32_t shard =
        threads.fetch_add(1, std::memory_order_relaxed) % kShards;
    return shards_[shard].count;
  }
  bool idle(std::size_t shard) const noexcept { return shards_[shard].count.load() == 0; }

 private:
  struct alignas(64) Shard {
    std::atomic<std::uint32_t> count{0};
  };
  std::array<Shard, kShards> shards_;
};

// While it lives, nothing that can be reached from the table is destroyed. Sequentially consistent:
// whoever is not seen by a writer sees the writer's new table.
class Reading {
 public:
  explicit Reading(Readers& readers) noexcept : count_(readers.mine()) { count_.fetch_add(1); }
  ~Reading() { count_.fetch_sub(1); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  std::atomic<std::uint32_t>& count_;
};

// A preparation that goes on, for those who wait for it.
struct Flight {
  OpDesc op;
  std::thread::id owner;
  bool done = false;
  std::shared_ptr<const Choice> choice;
  std::function<void()> raise;  // throws the error anew, so that each thread has its own
};

template <typename Failure>
std::function<void()> again(const Failure& error) {
  return [error] { throw Failure(error); };
}

std::function<void()> again_current() {
  try {
    throw;
  } catch (const OutOfMemoryError& error) {
    return again(error);
  } catch (const CudaError& error) {
    return again(error);
  } catch (const UnsupportedOperationError& error) {
    return again(error);
  } catch (const InputError& error) {
    return again(error);
  } catch (...) {
    return {};  // those who wait try for themselves
  }
}

// "matmul cublas.cublasLt layers.3.attn", as a trace shows it.
std::string range_name(const OpDesc& op, const Decision& decision) {
  std::string name(to_string(op.kind));
  name += ' ' + decision.chosen;
  const std::string& place = decision.module.empty() ? decision.node : decision.module;
  return place.empty() ? name : name + ' ' + place;
}

bool capturing(DeviceId device, StreamHandle stream) {
  return device.type == DeviceType::kCuda && calls::stream_capturing(device.index, stream);
}

}  // namespace

struct CallSite::Cache {
  struct Table {
    Table(std::size_t size, std::uint64_t version)
        : mask(size - 1), registry(version), slots(size) {}
    const std::size_t mask;
    const std::uint64_t registry;  // its version
    std::vector<std::atomic<Entry*>> slots;
    std::size_t count = 0;  // under the mutex
  };
  struct Retired {
    std::unique_ptr<Table> table;
    std::vector<std::unique_ptr<Entry>> entries;
    std::uint32_t seen = (1U << Readers::kShards) - 1;  // shards that may still read it
  };

  Entry* find(const OpDesc& op, std::size_t hash, std::uint64_t version) const noexcept {
    const Table* const now = table.load();
    if (now->registry != version) return nullptr;
    for (std::size_t at = hash & now->mask;; at = (at + 1) & now->mask) {
      Entry* const entry = now->slots[at].load(std::memory_order_acquire);
      if (entry == nullptr) return nullptr;
      if (entry->hash == hash && entry->op == op) return entry;
    }
  }

  static std::atomic<Entry*>& place(Table& in, const Entry& entry) noexcept {
    std::size_t at = entry.hash & in.mask;
    while (const Entry* other = in.slots[at].load(std::memory_order_relaxed)) {
      if (other->hash == entry.hash && other->op == entry.op) break;
      at = (at + 1) & in.mask;
    }
    return in.slots[at];
  }

  void publish(std::unique_ptr<Table> next, std::vector<std::unique_ptr<Entry>> gone) {
    retired.push_back({std::move(owned), std::move(gone)});
    owned = std::move(next);
    table.store(owned.get());
  }

  // What has no readers any more. Destroyed by the caller, without the lock.
  std::vector<Retired> sweep() {
    for (Retired& one : retired) {
      for (std::size_t shard = 0; shard < Readers::kShards; ++shard) {
        if (readers.idle(shard)) one.seen &= ~(1U << shard);
      }
    }
    const auto first = std::stable_partition(retired.begin(), retired.end(),
                                             [](const Retired& one) { return one.seen != 0; });
    std::vector<Retired> free(std::make_move_iterator(first),
                              std::make_move_iterator(retired.end()));
    retired.erase(first, retired.end());
    return free;
  }

  void insert(std::unique_ptr<Entry> entry, std::uint64_t version) {
    if (owned->registry > version) return;  // kernels came or went while it was made
    if (owned->registry < version || owned->count >= kMost) {
      publish(std::make_unique<Table>(kFirstSize, version), std::exchange(entries, {}));
    } else if (2 * owned->count >= owned->slots.size()) {
      auto next = std::make_unique<Table>(2 * owned->slots.size(), version);
      for (const auto& one : entries) place(*next, *one).store(one.get());
      next->count = owned->count;
      publish(std::move(next), {});
    }
    std::atomic<Entry*>& slot = place(*owned, *entry);
    if (Entry* const before = slot.load(std::memory_order_relaxed)) {
      const auto found =
          std::find_if(entries.begin(), entries.end(),
                       [&](const std::unique_ptr<Entry>& one) { return one.get() == before; });
      Retired gone;
      gone.entries.push_back(std::exchange(*found, std::move(entry)));
      slot.store((*found).get());
      retired.push_back(std::move(gone));
      return;
    }
    Entry* const raw = entry.get();
    entries.push_back(std::move(entry));
    ++owned->count;
    slot.store(raw);
  }

  static constexpr std::size_t kFirstSize = 64;

  mutable Readers readers;
  std::mutex mutex;
  std::condition_variable landed;
  std::unique_ptr<Table> owned = std::make_unique<Table>(kFirstSize, 0);
  std::atomic<Table*> table{owned.get()};
  std::vector<std::unique_ptr<Entry>> entries;
  std::vector<Retired> retired;
  std::vector<std::shared_ptr<Flight>> flights;
};

CallSite::CallSite(Dispatcher& dispatcher, std::shared_ptr<const KernelRules> rules,
                   std::string node, std::string module, std::vector<std::string> pin)
    : dispatcher_(dispatcher),
      rules_(std::move(rules)),
      log_(rules_ != nullptr && rules_->log != nullptr ? rules_->log.get() : &dispatcher.log()),
      node_(std::move(node)),
      module_(std::move(module)),
      pin_(std::move(pin)),
      cache_(std::make_unique<Cache>()) {
  if (rules_ == nullptr) throw InputError("a call site needs rules: pass an empty KernelRules");
}

CallSite::~CallSite() = default;

std::vector<std::shared_ptr<const Decision>> CallSite::decisions() const {
  const std::lock_guard lock(cache_->mutex);
  std::vector<std::shared_ptr<const Decision>> found;
  found.reserve(cache_->entries.size());
  for (const auto& entry : cache_->entries) found.push_back(entry->choice->decision);
  return found;
}

// A cached entry, noted in the log; null where somebody has to decide first.
CallSite::Entry* CallSite::cached(const OpDesc& op, std::size_t hash) const {
  Entry* const entry = cache_->find(op, hash, dispatcher_.registry_.version());
  if (entry == nullptr || entry->choice->unmeasured) return nullptr;
  const std::uint64_t epoch = log_->epoch();
  if (entry->epoch.load(std::memory_order_relaxed) != epoch) [[unlikely]] {
    note(*entry, epoch);
  }
  return entry;
}

void CallSite::note(Entry& entry, std::uint64_t epoch) const {
  if (entry.epoch.exchange(epoch, std::memory_order_relaxed) == epoch) return;
  entry.choice->decision->count.store(0, std::memory_order_relaxed);
  log_->record(entry.choice->decision);
}

std::shared_ptr<const Choice> CallSite::choose(const OpDesc& op, StreamHandle stream) {
  const std::size_t hash = hash_value(op);
  {
    const Reading reading(cache_->readers);
    if (const Entry* entry = cached(op, hash)) return entry->choice;
  }
  return decide(op, hash, stream);
}

bool CallSite::try_run(const OpDesc& op, void* const* operands, StreamHandle stream) {
  const Reading reading(cache_->readers);
  const Entry* const entry = cached(op, hash_value(op));
  if (entry == nullptr) return false;
  launch(*entry->choice, op, operands, stream);
  return true;
}

void CallSite::run(const OpDesc& op, void* const* operands, StreamHandle stream) {
  if (try_run(op, operands, stream)) return;
  const std::shared_ptr<const Choice> choice = decide(op, hash_value(op), stream);
  launch(*choice, op, operands, stream);
}

void CallSite::launch(const Choice& choice, const OpDesc& op, void* const* operands,
                      StreamHandle stream) const {
  const Workspaces::Lease workspace =
      choice.workspace_bytes == 0
          ? Workspaces::Lease()
          : dispatcher_.workspaces().get(op.device, stream, choice.workspace_bytes);
  const ProfiledRange range([&] { return range_name(op, *choice.decision); }, "kernel", op.device,
                            stream);
  if (op.device.type == DeviceType::kCuda) {
    cuda::launch_kernel(op.device.index, *choice.kernel, operands, workspace.data(), stream);
  } else {
    choice.kernel->launch(operands, workspace.data(), stream);
  }
  choice.decision->count.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<const Choice> CallSite::decide(const OpDesc& op, std::size_t hash,
                                               StreamHandle stream) {
  Cache& cache = *cache_;
  const auto flight = std::make_shared<Flight>();
  flight->op = op;
  flight->owner = std::this_thread::get_id();
  const bool measures = rules_->strategy == AutoStrategy::kBestPerformance;
  const bool may_measure = measures && !capturing(op.device, stream);
  std::vector<Cache::Retired> free;
  std::unique_lock lock(cache.mutex);
  for (;;) {
    const Entry* const entry = cache.find(op, hash, dispatcher_.registry_.version());
    if (entry != nullptr && (!entry->choice->unmeasured || !may_measure)) return entry->choice;
    const auto other = std::find_if(cache.flights.begin(), cache.flights.end(),
                                    [&](const auto& one) { return one->op == op; });
    if (other == cache.flights.end()) break;
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the list changes meanwhile
    const std::shared_ptr<Flight> awaited = *other;
    if (awaited->owner == flight->owner) {
      throw UnsupportedOperationError("a kernel that is being prepared for " + describe(op) +
                                          " asks for this same operation: it would wait for itself",
                                      to_string(op.device));
    }
    cache.landed.wait(lock, [&] { return awaited->done; });
    if (awaited->raise) awaited->raise();
    if (awaited->choice != nullptr) return awaited->choice;
  }
  cache.flights.push_back(flight);
  lock.unlock();

  const auto land = [&] {  // with the lock
    flight->done = true;
    std::erase(cache.flights, flight);
    cache.landed.notify_all();
  };
  const std::uint64_t version = dispatcher_.registry_.version();
  try {
    flight->choice = make(op, may_measure);
    auto entry = std::make_unique<Entry>();
    entry->op = op;
    entry->hash = hash;
    entry->choice = flight->choice;
    note(*entry, log_->epoch());
    lock.lock();
    cache.insert(std::move(entry), version);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    flight->raise = again_current();
    flight->choice = nullptr;
    land();
    throw;
  }
  land();
  free = cache.sweep();
  lock.unlock();
  return flight->choice;
}

std::shared_ptr<const Choice> CallSite::make(const OpDesc& op, bool may_measure) const {
  const DeviceInfo& device = dispatcher_.devices_.get_device_info(op.device);
  return std::make_shared<const Choice>(
      dispatcher_.decide(op, *rules_, device, node_, module_, pin_, true, may_measure));
}

}  // namespace xpuruntime

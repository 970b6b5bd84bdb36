// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace xpuruntime {

/// Receives from connected sockets into memory of the caller, in threads of its own.
///
/// A server hands a request's body to it, of which it knows the length. The event loop of the
/// server sees it again when it is whole, instead of with each part that has come.
///
/// Thread-safe. In a child of a fork there are no threads: it does nothing there, and ends without
/// waiting for them.
class SocketReceiver {
 public:
  /// How a request to receive ended. `size` is below what was asked where the peer has closed the
  /// connection, where that failed, or where the time was over: what is left is in the socket.
  struct Received {
    std::uint64_t id = 0;
    std::size_t size = 0;
  };

  /// Starts so many threads, at least one. Throws Error where the system has no file
  /// descriptor for it.
  explicit SocketReceiver(int threads);

  /// See `close`.
  ~SocketReceiver();
  SocketReceiver(const SocketReceiver&) = delete;
  SocketReceiver& operator=(const SocketReceiver&) = delete;

  /// A file descriptor that can be read while `received` has something to return.
  int descriptor() const noexcept { return notice_[0]; }

  /// Begins to receive `size` bytes from a socket, for at most `within`. Nothing else may read the
  /// socket meanwhile; closing it is allowed, since a duplicate is read. `memory` must stay until
  /// `received` has returned the id, or `close` has. Throws InputError where `socket` is none.
  void receive(std::uint64_t id, int socket, void* memory, std::size_t size,
               std::chrono::milliseconds within);

  /// Takes what has ended since the last call.
  std::vector<Received> received();

  /// Ends the threads, and returns when no memory is written any more. What had not ended never
  /// does. Again does nothing.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    std::uint64_t id = 0;
    int socket = -1;
    char* memory = nullptr;
    std::size_t size = 0, done = 0;
    Clock::time_point until;
    bool ready = true;  // whether something may be read
  };
  struct Worker;

  void run(Worker& worker);
  void finish(Job& job);
  /// Whether the job has ended.
  static bool read(Job& job);

  int notice_[2] = {-1, -1};
  pid_t process_;
  std::mutex mutex_;  // of what follows, and of the inboxes of the workers
  std::vector<Received> received_;
  std::vector<std::unique_ptr<Worker>> workers_;
  bool closed_ = false;
};

}  // namespace xpuruntime

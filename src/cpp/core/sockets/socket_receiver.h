// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace xpuruntime {

/// Receives from connected sockets into memory of the caller, in threads of its own.
///
/// A server hands a request's body to it, of which it knows the length. The event loop of the
/// server sees it again when it is whole, instead of with each part that has come. The response can
/// be handed over with the head that is expected next: it is sent, and the server sees the
/// connection again when the next request is whole, or is another one.
///
/// Thread-safe. In a child of a fork there are no threads: it does nothing there, and ends without
/// waiting for them.
class SocketReceiver {
 public:
  /// How a request to receive ended. `size` is below what was asked where the peer has closed the
  /// connection, where that failed, or where the time was over: what is left is in the socket.
  /// Where the expected head has not come, `expected` is false, `other` is all that came instead,
  /// and the memory has no meaning. `unsent` bytes of a response could not be sent at once; then
  /// nothing was received.
  struct Received {
    std::uint64_t id = 0;
    std::size_t size = 0;
    bool expected = true;
    std::string other;
    std::size_t unsent = 0;
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
               std::chrono::milliseconds within) {
    respond(id, socket, {}, {}, memory, size, within);
  }

  /// As `receive`, but sends a response before, and expects a head behind it: these very bytes, and
  /// then `size` more. `response` must stay as long as `memory`, and nothing else may write.
  void respond(std::uint64_t id, int socket, std::string_view response, std::string_view head,
               void* memory, std::size_t size, std::chrono::milliseconds within);

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
    std::string_view response;  // of which the rest is to be sent
    std::string head;           // that is expected
    std::string came;           // in its place, as long
    std::size_t came_size = 0;  // of which so much is valid
    bool ready = true;          // whether something may be read
  };
  struct Worker;

  void run(Worker& worker);
  void finish(Job& job);
  /// Whether the job has not ended.
  static bool send(Job& job);
  /// Whether the job has ended.
  static bool read(Job& job);
  static bool has_head(const Job& job);

  int notice_[2] = {-1, -1};
  pid_t process_;
  std::mutex mutex_;  // of what follows, and of the inboxes of the workers
  std::vector<Received> received_;
  std::vector<std::unique_ptr<Worker>> workers_;
  bool closed_ = false;
};

}  // namespace xpuruntime

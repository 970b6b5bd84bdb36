// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "sockets/socket_receiver.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

// Bytes that one socket may have in a row while others wait for the same thread.
constexpr std::size_t kTurn = std::size_t{1} << 20;

bool open_pipe(int (&ends)[2]) {
  if (::pipe(ends) != 0) return false;
  for (const int end : ends) {
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
    ::fcntl(end, F_SETFL, O_NONBLOCK);
  }
  return true;
}

void close_pipe(int (&ends)[2]) {
  for (int& end : ends) {
    if (end >= 0) ::close(end);
    end = -1;
  }
}

void wake(int end) {
  const char one = 1;
  // A full pipe is readable already.
  while (::write(end, &one, 1) < 0 && errno == EINTR) {
  }
}

void drain(int end) {
  char several[64];
  while (::read(end, several, sizeof several) > 0 || errno == EINTR) {
  }
}

}  // namespace

struct SocketReceiver::Worker {
  int wake[2] = {-1, -1};
  std::vector<Job> inbox;  // under the mutex
  std::size_t jobs = 0;    // under the mutex: those of the inbox, too
  std::thread thread;
};

SocketReceiver::SocketReceiver(int threads) : process_(::getpid()) {
  bool opened = open_pipe(notice_);
  for (int made = 0; opened && made < std::max(1, threads); ++made) {
    auto worker = std::make_unique<Worker>();
    opened = open_pipe(worker->wake);
    workers_.push_back(std::move(worker));
  }
  if (!opened) {
    const std::string reason = std::generic_category().message(errno);
    close_pipe(notice_);
    for (auto& worker : workers_) close_pipe(worker->wake);
    throw Error("no pipe could be opened to receive from sockets: " + reason +
                ". Fix: close files, or raise the limit of open files (ulimit -n)");
  }
  // The threads take no signals: those are handled in Python's main thread.
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  for (auto& worker : workers_) {
    worker->thread = std::thread([this, &one = *worker] { run(one); });
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SocketReceiver::~SocketReceiver() {
  close();
  close_pipe(notice_);
}

void SocketReceiver::receive(std::uint64_t id, int socket, void* memory, std::size_t size,
                             std::chrono::milliseconds within) {
  const int duplicate = ::fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) {
    throw InputError("socket " + std::to_string(socket) +
                     " cannot be received from: " + std::generic_category().message(errno) +
                     ". Fix: pass the descriptor of a connected socket");
  }
  Job job;
  job.id = id;
  job.socket = duplicate;
  job.memory = static_cast<char*>(memory);
  job.size = size;
  job.until = Clock::now() + within;
  bool refused = true;
  int end = -1;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      Worker& worker =
          **std::min_element(workers_.begin(), workers_.end(),
                             [](const auto& a, const auto& b) { return a->jobs < b->jobs; });
      refused = false;
      if (worker.inbox.empty()) end = worker.wake[1];
      worker.inbox.push_back(job);
      ++worker.jobs;
    }
  }
  if (refused) {
    ::close(duplicate);
    throw InputError("the receiver is closed. Fix: make another one");
  }
  if (end >= 0) wake(end);
}

std::vector<SocketReceiver::Received> SocketReceiver::received() {
  drain(notice_[0]);
  const std::lock_guard lock(mutex_);
  return std::exchange(received_, {});
}

void SocketReceiver::close() {
  if (::getpid() != process_) {
    // The threads are the parent's, and the mutex may be one of theirs.
    for (auto& worker : workers_) static_cast<void>(worker.release());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  for (auto& worker : workers_) wake(worker->wake[1]);
  for (auto& worker : workers_) {
    worker->thread.join();
    close_pipe(worker->wake);
  }
}

void SocketReceiver::finish(Job& job) {
  ::close(job.socket);
  bool first;
  {
    const std::lock_guard lock(mutex_);
    first = received_.empty();
    received_.push_back({job.id, job.done});
  }
  if (first) wake(notice_[1]);
}

bool SocketReceiver::read(Job& job) {
  for (std::size_t turn = 0; turn < kTurn && job.done != job.size;) {
    const ssize_t got =
        ::recv(job.socket, job.memory + job.done, job.size - job.done, MSG_DONTWAIT);
    if (got > 0) {
      job.done += static_cast<std::size_t>(got);
      turn += static_cast<std::size_t>(got);
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      job.ready = false;
      break;
    } else {
      return true;  // closed, or failed: the caller sees that when it reads
    }
  }
  return job.done == job.size;
}

void SocketReceiver::run(Worker& worker) {
  std::vector<Job> jobs, added;
  std::vector<pollfd> polled;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_) break;
      added.swap(worker.inbox);
    }
    jobs.insert(jobs.end(), added.begin(), added.end());
    added.clear();
    std::size_t ended = 0;
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    for (std::size_t at = 0; at < jobs.size();) {
      if ((jobs[at].ready && read(jobs[at])) || jobs[at].until <= now) {
        finish(jobs[at]);
        jobs[at] = jobs.back();
        jobs.pop_back();
        ++ended;
      } else {
        next = std::min(next, jobs[at++].until);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      worker.jobs -= ended;
      if (closed_) break;
      if (!worker.inbox.empty()) continue;
    }
    polled.clear();
    polled.push_back({worker.wake[0], POLLIN, 0});
    for (const Job& job : jobs) polled.push_back({job.socket, POLLIN, 0});
    int timeout = -1;
    if (!jobs.empty()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
      timeout = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    }
    if (std::any_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.ready; })) {
      timeout = 0;  // its turn was over, and others may have something by now
    }
    ::poll(polled.data(), static_cast<nfds_t>(polled.size()), timeout);
    if (polled[0].revents != 0) drain(worker.wake[0]);
    for (std::size_t at = 0; at < jobs.size(); ++at) {
      if (polled[at + 1].revents != 0) jobs[at].ready = true;
    }
  }
  for (const Job& job : jobs) ::close(job.socket);
  for (const Job& job : worker.inbox) ::close(job.socket);
}

}  // namespace xpuruntime

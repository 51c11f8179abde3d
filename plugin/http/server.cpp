// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/http/server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "netdriver/unique_fd.h"
#include "plugin/http/parser.h"

namespace agentgate::http {
namespace {

using netdriver::UniqueFd;

constexpr int kBacklog = 128;

Result<sockaddr_un> address_of(const std::string& operation, const std::filesystem::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string& text = path.native();
  if (text.empty() || text[0] != '/' || text.size() >= sizeof address.sun_path) {
    return fail(operation,
                "the socket must be an absolute path of at most " +
                    std::to_string(sizeof address.sun_path - 1) + " bytes",
                EINVAL);
  }
  std::memcpy(address.sun_path, text.data(), text.size());
  return address;
}

// Makes room for a new socket: nothing there, or a socket that nobody listens on any more.
Status remove_stale(const std::string& operation, const std::filesystem::path& path,
                    const sockaddr_un& address) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return {};
    return fail_errno(operation);
  }
  if (!S_ISSOCK(found.st_mode)) {
    return fail(operation, "what is there is not a socket; remove it or choose another path",
                EEXIST);
  }
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (probe.get() < 0) return fail_errno(operation);
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
      errno == EAGAIN) {  // EAGAIN: somebody listens, its backlog is full
    return fail(operation, "another process answers there; is a second agentgated running?",
                EADDRINUSE);
  }
  if (errno != ECONNREFUSED) return fail_errno(operation);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return fail_errno(operation);
  return {};
}

// Owner and mode are set before listen(): until then nobody can connect, whatever the umask is.
Result<UniqueFd> listen_on(const Options& options) {
  const std::string operation = "listen on " + options.socket.string();
  const auto address = address_of(operation, options.socket);
  if (!address) return tl::unexpected(address.error());
  std::error_code made;
  std::filesystem::create_directories(options.socket.parent_path(), made);
  if (made) return fail(operation, "cannot make its directory", made.value());
  if (const Status room = remove_stale(operation, options.socket, *address); !room) {
    return tl::unexpected(room.error());
  }
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.get() < 0) return fail_errno(operation);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return fail_errno(operation);
  }
  const auto give_up = [&] {
    auto error = fail_errno(operation);
    ::unlink(options.socket.c_str());
    return error;
  };
  if (options.owner || options.group) {
    if (::lchown(options.socket.c_str(), options.owner.value_or(static_cast<uid_t>(-1)),
                 options.group.value_or(static_cast<gid_t>(-1))) != 0) {
      return give_up();
    }
  }
  if (::chmod(options.socket.c_str(), options.mode) != 0) return give_up();
  if (::listen(listener.get(), kBacklog) != 0) return give_up();
  return listener;
}

// What the client still sends is read and thrown away, for a short while: closing a Unix socket
// with unread data resets the connection and can take the answer with it.
void linger(int fd) {
  ::shutdown(fd, SHUT_WR);
  std::array<char, 16384> sink{};
  std::size_t budget = 4U << 20U;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  while (budget > 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                          until - std::chrono::steady_clock::now())
                          .count();
    pollfd entry{fd, POLLIN, 0};
    if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0) return;
    const ssize_t got = ::recv(fd, sink.data(), sink.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    budget -= std::min(budget, static_cast<std::size_t>(got));
  }
}

}  // namespace

struct Server::Impl {
  Impl(Options given, Handler handler)
      : options(std::move(given)), parser(options, std::move(handler)) {}

  // Hands connections to workers; waits while all of them are busy, so that the rest queues in
  // the kernel and costs us nothing.
  void accept_loop() {
    for (;;) {
      {
        std::unique_lock lock(mutex);
        room.wait(lock, [&] { return stopping || busy + waiting.size() < options.connections; });
        if (stopping) return;
      }
      std::array<pollfd, 2> entries{{{listener.get(), POLLIN, 0}, {wake.get(), POLLIN, 0}}};
      if (::poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) pause_briefly();
      {
        const std::lock_guard lock(mutex);
        if (stopping) return;
      }
      if ((entries[0].revents & POLLIN) == 0) continue;
      const int fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) {
        take(fd);
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        pause_briefly();  // must not spin while the process or host is short of something
      }
    }
  }

  static void pause_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

  void take(int fd) {
    const std::lock_guard lock(mutex);
    waiting.push_back(fd);
    if (idle >= waiting.size()) {
      work.notify_one();
      return;
    }
    try {
      workers.emplace_back([this] { worker_loop(); });
    } catch (const std::system_error&) {
      if (!workers.empty()) return;  // the others will come to it
      waiting.pop_back();
      ::close(fd);
    }
  }

  void worker_loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      ++idle;
      work.wait(lock, [&] { return stopping || !waiting.empty(); });
      --idle;
      if (waiting.empty()) return;
      const int fd = waiting.front();
      waiting.pop_front();
      if (stopping) {
        ::close(fd);
        continue;
      }
      ++busy;
      reading.insert(fd);
      lock.unlock();
      serve(fd);
      lock.lock();
      reading.erase(fd);
      ::close(fd);
      --busy;
      room.notify_one();
    }
  }

  void serve(int fd) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return;
    const Peer peer{credentials.pid, credentials.uid, credentials.gid};
    const bool served = parser.serve(fd, peer, [this, fd] {
      const std::lock_guard lock(mutex);
      reading.erase(fd);
    });
    if (served) linger(fd);
  }

  Options options;
  Parser parser;
  UniqueFd listener;
  UniqueFd wake;
  dev_t device = 0;  // of the socket file, to remove only our own
  ino_t inode = 0;

  std::mutex mutex;
  std::condition_variable work;  // for workers
  std::condition_variable room;  // for the acceptor
  std::deque<int> waiting;
  std::set<int> reading;  // connections whose request is not complete; cut off by stop()
  std::size_t idle = 0;
  std::size_t busy = 0;
  bool stopping = false;
  std::vector<std::thread> workers;
  std::thread acceptor;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { stop(); }

Result<std::unique_ptr<Server>> Server::start(Options options, Handler handler) {
  const std::string operation = "listen on " + options.socket.string();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(handler));
  impl->wake = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (impl->wake.get() < 0) return fail_errno(operation);
  auto listener = listen_on(impl->options);
  if (!listener) return tl::unexpected(listener.error());
  impl->listener = std::move(*listener);
  struct stat made {};
  if (::stat(impl->options.socket.c_str(), &made) == 0) {
    impl->device = made.st_dev;
    impl->inode = made.st_ino;
  }
  try {
    impl->acceptor = std::thread([raw = impl.get()] { raw->accept_loop(); });
  } catch (const std::system_error& error) {
    ::unlink(impl->options.socket.c_str());
    return fail(operation, "cannot start a thread", error.code().value());
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

void Server::stop() {
  Impl& it = *impl_;
  if (!it.acceptor.joinable()) return;
  {
    const std::lock_guard lock(it.mutex);
    it.stopping = true;
    for (const int fd : it.reading) ::shutdown(fd, SHUT_RD);
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(it.wake.get(), &one, sizeof one);
  it.work.notify_all();
  it.room.notify_all();
  it.acceptor.join();
  // The file goes first, so that clients which come now do not wait for handlers that finish.
  struct stat found {};
  if (::stat(it.options.socket.c_str(), &found) == 0 && found.st_dev == it.device &&
      found.st_ino == it.inode) {
    ::unlink(it.options.socket.c_str());
  }
  it.listener.reset();
  for (std::thread& worker : it.workers) worker.join();
  it.workers.clear();
  for (const int fd : it.waiting) ::close(fd);
  it.waiting.clear();
}

}  // namespace agentgate::http

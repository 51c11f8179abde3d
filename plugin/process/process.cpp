// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/process/process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace agentgate::process {
namespace {

using netdriver::UniqueFd;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kKeptText = 1 << 20;  // of captured output; nothing we ask for is that long

sigset_t handled() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    sigaddset(&set, number);
  }
  return set;
}

// "@name" is an abstract address, anything else a path.
UniqueFd connect_to(const std::string& address) {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  if (address.empty() || address.size() >= sizeof to.sun_path) return {};
  std::memcpy(to.sun_path, address.data(), address.size());
  socklen_t length = sizeof to;
  if (address[0] == '@') {
    to.sun_path[0] = '\0';
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) != 0) {
    return {};
  }
  (void)::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  return fd;
}

void write_all(int fd, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = ::write(fd, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

}  // namespace

Signals::Signals(const std::string& stop_socket) {
  const sigset_t set = handled();
  (void)::pthread_sigmask(SIG_BLOCK, &set, &previous_);
  fd_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  stop_ = connect_to(stop_socket);
}

Signals::~Signals() {
  while (next()) {  // what came too late to matter must not end the program now
  }
  (void)::pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

std::optional<int> Signals::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    return static_cast<int>(info.ssi_signo);
  }
  if (stop_.valid()) {
    char byte = 0;
    const ssize_t got = ::read(stop_.get(), &byte, 1);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      stop_.reset();
      return SIGTERM;
    }
  }
  return std::nullopt;
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      own_group_(other.own_group_),
      pidfd_(std::move(other.pidfd_)),
      in_(std::move(other.in_)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)),
      in_text_(std::move(other.in_text_)),
      out_text_(std::move(other.out_text_)),
      err_text_(std::move(other.err_text_)) {}

Child& Child::operator=(Child&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(own_group_, other.own_group_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(in_, other.in_);
  std::swap(out_, other.out_);
  std::swap(err_, other.err_);
  in_text_.swap(other.in_text_);
  out_text_.swap(other.out_text_);
  err_text_.swap(other.err_text_);
  return *this;
}

Child::~Child() {
  if (pid_ < 0) return;
  kill(SIGKILL);
  (void)reap();
}

Result<Child> Child::start(const std::vector<std::string>& argv, const Options& options,
                           const Signals* signals) {
  Child child;
  child.own_group_ = options.group == Group::kOwn;
  std::vector<char*> words;
  words.reserve(argv.size() + 1);
  for (const auto& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  UniqueFd out_far;
  UniqueFd err_far;
  const auto capture = [&](int number, UniqueFd& near, UniqueFd& far) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return false;
    near = UniqueFd(ends[0]);
    far = UniqueFd(ends[1]);
    (void)::fcntl(near.get(), F_SETFL, O_NONBLOCK);
    return posix_spawn_file_actions_adddup2(&actions, far.get(), number) == 0;
  };
  bool good = true;
  UniqueFd in_far;
  if (options.input == Input::kNone) {
    good = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0) == 0;
  } else if (options.input == Input::kPump) {
    std::array<int, 2> ends{};  // sockets: writing to one that is gone raises no SIGPIPE
    good = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0;
    if (good) {
      child.in_ = UniqueFd(ends[0]);
      in_far = UniqueFd(ends[1]);
      good = posix_spawn_file_actions_adddup2(&actions, in_far.get(), 0) == 0;
    }
  }
  if (options.out == Output::kCapture) good = capture(1, child.out_, out_far) && good;
  if (options.err == Output::kCapture) good = capture(2, child.err_, err_far) && good;
  short flags = 0;
  if (child.own_group_) flags |= POSIX_SPAWN_SETPGROUP;
  if (signals != nullptr) {
    flags |= POSIX_SPAWN_SETSIGMASK;
    good = posix_spawnattr_setsigmask(&attributes, &signals->previous_mask()) == 0 && good;
  }
  good = posix_spawnattr_setflags(&attributes, flags) == 0 && good;
  int error = EMFILE;
  if (good) {
    error = ::posix_spawnp(&child.pid_, words[0], &actions, &attributes, words.data(), environ);
  }
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    child.pid_ = -1;
    return fail("run " + argv[0], error == ENOENT ? "no such program" : "cannot be started", error);
  }
  child.pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, child.pid_, 0)));
  if (!child.pidfd_.valid()) return fail_errno("run " + argv[0], "pidfd_open");
  return child;
}

void Child::pump(short our_input, short its_input) {
  if (our_input != 0) {
    std::array<char, 4096> buffer{};
    const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got <= 0) {
      in_.reset();  // the end: the child sees it as well
      return;
    }
    in_text_.assign(buffer.data(), static_cast<std::size_t>(got));
  } else if (its_input == 0) {
    return;
  }
  const ssize_t sent =
      ::send(in_.get(), in_text_.data(), in_text_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) {
    in_text_.erase(0, static_cast<std::size_t>(sent));
  } else if (errno != EAGAIN && errno != EINTR) {
    in_.reset();
  }
}

void Child::read_from(UniqueFd& fd, std::string& text, bool tee) {
  std::array<char, 16384> buffer{};
  while (fd.valid()) {
    const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      fd.reset();
      return;
    }
    const auto size = static_cast<std::size_t>(got);
    if (tee) write_all(STDERR_FILENO, buffer.data(), size);
    text.append(buffer.data(), std::min(size, kKeptText - std::min(kKeptText, text.size())));
  }
}

Exit Child::reap() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status)};
}

std::optional<Exit> Child::wait(const Signals* signals,
                                std::optional<std::chrono::milliseconds> limit, bool tee_err) {
  const auto end = Clock::now() + limit.value_or(std::chrono::milliseconds(0));
  for (;;) {
    // Our input is read only when all of it that was read has been handed on.
    const bool hungry = in_.valid() && in_text_.empty();
    std::array<pollfd, 7> fds{{{pidfd_.get(), POLLIN, 0},
                               {out_.get(), POLLIN, 0},
                               {err_.get(), POLLIN, 0},
                               {signals != nullptr ? signals->fd() : -1, POLLIN, 0},
                               {signals != nullptr ? signals->stop_fd() : -1, POLLIN, 0},
                               {hungry ? STDIN_FILENO : -1, POLLIN, 0},
                               {in_text_.empty() ? -1 : in_.get(), POLLOUT, 0}}};
    int timeout = -1;
    if (limit) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      timeout = static_cast<int>(std::max<long>(0, left.count()));
    }
    const int ready = ::poll(fds.data(), fds.size(), timeout);
    if (ready < 0) continue;  // EINTR
    read_from(out_, out_text_, false);
    read_from(err_, err_text_, tee_err);
    if (fds[0].revents != 0) {
      // What it wrote before it ended; a process that it left behind may hold the pipe open.
      read_from(out_, out_text_, false);
      read_from(err_, err_text_, tee_err);
      return reap();
    }
    pump(fds[5].revents, fds[6].revents);
    if (fds[3].revents != 0 || fds[4].revents != 0) return std::nullopt;
    if (ready == 0 && limit) return std::nullopt;
  }
}

void Child::kill(int signal) const {
  if (pid_ > 0) (void)::kill(own_group_ ? -pid_ : pid_, signal);
}

Exit Child::end() {
  kill(SIGTERM);
  kill(SIGCONT);
  if (const auto ended = wait(nullptr, std::chrono::seconds(5))) return *ended;
  kill(SIGKILL);
  return *wait(nullptr, std::nullopt);
}

}  // namespace agentgate::process

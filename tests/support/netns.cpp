// SPDX-License-Identifier: GPL-2.0-or-later
#include "tests/support/netns.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>

namespace agentgate::test {

NetNamespace::NetNamespace() {
  std::exception_ptr error;
  std::thread([&] {
    if (::unshare(CLONE_NEWNET) != 0) {
      error = std::make_exception_ptr(
          std::runtime_error(std::string("unshare: ") + std::strerror(errno)));
      return;
    }
    fd_ = ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  }).join();
  if (error) std::rethrow_exception(error);
  must({"/sbin/ip", "link", "set", "lo", "up"});
}

NetNamespace::~NetNamespace() {
  if (fd_ >= 0) ::close(fd_);
}

std::string NetNamespace::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
}

void NetNamespace::run_inside(const std::function<void()>& work) const {
  std::exception_ptr error;
  std::thread([&] {
    try {
      if (::setns(fd_, CLONE_NEWNET) != 0) {
        throw std::runtime_error(std::string("setns: ") + std::strerror(errno));
      }
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

Output NetNamespace::exec(const std::vector<std::string>& argv) const {
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0)
    throw std::runtime_error("pipe");
  std::vector<char*> arguments;
  arguments.reserve(argv.size() + 1);
  for (const auto& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, 0);
    if (::setns(fd_, CLONE_NEWNET) != 0) ::_exit(126);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  Output result;
  pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  for (int open = 2; open > 0;) {
    ::poll(fds, 2, -1);
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || fds[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t length = ::read(fds[i].fd, buffer, sizeof buffer);
      if (length <= 0) {
        ::close(fds[i].fd);
        fds[i].fd = -1;
        --open;
      } else {
        (i == 0 ? result.out : result.err).append(buffer, static_cast<std::size_t>(length));
      }
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string NetNamespace::must(const std::vector<std::string>& argv) const {
  Output result = exec(argv);
  if (result.status != 0) {
    std::string command;
    for (const auto& argument : argv) command += argument + " ";
    ADD_FAILURE() << command << "exited with " << result.status << ": " << result.err;
  }
  return result.out;
}

nlohmann::json NetNamespace::json(const std::vector<std::string>& argv) const {
  return nlohmann::json::parse(must(argv));
}

namespace {

// IPv6 addresses are usable at once: a test would wait a second for DAD otherwise.
void configure(const LinkEnd& end) {
  if (!end.mac.empty()) end.where.must({"ip", "link", "set", end.name, "address", end.mac});
  for (const auto& address : end.addresses) {
    std::vector<std::string> command = {"ip", "addr", "add", address, "dev", end.name};
    if (address.find(':') != std::string::npos) command.emplace_back("nodad");
    end.where.must(command);
  }
  end.where.must({"ip", "link", "set", end.name, "up"});
}

}  // namespace

void make_veth(const LinkEnd& a, const LinkEnd& b) {
  a.where.must({"ip", "link", "add", a.name, "type", "veth", "peer", "name", b.name, "netns",
                b.where.path()});
  configure(a);
  configure(b);
}

void make_bridge(const LinkEnd& bridge) {
  bridge.where.must({"ip", "link", "add", bridge.name, "type", "bridge"});
  configure(bridge);
}

void enslave(const NetNamespace& where, const std::string& bridge, const std::string& port) {
  where.must({"ip", "link", "set", port, "master", bridge});
}

void KernelTest::SetUp() {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
}

}  // namespace agentgate::test

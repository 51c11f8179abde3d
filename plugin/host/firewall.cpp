// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/host/firewall.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <sstream>

#include "netdriver/gate.h"

// NOLINTNEXTLINE(readability-redundant-declaration): POSIX has it in no header
extern char** environ;

namespace agentgate::host {
namespace {

struct Output {
  int status = -1;
  bool late = false;  // it was ended, since it had not by itself
  std::string text;
};

Output run(const std::vector<std::string>& argv, std::chrono::milliseconds patience) {
  Output out;
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) return out;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe[1], 1);
  posix_spawn_file_actions_adddup2(&actions, pipe[1], 2);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  std::vector<char*> arguments;
  for (const auto& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int failed =
      ::posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  if (failed != 0) {
    ::close(pipe[0]);
    return out;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  out.late = true;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd readable{pipe[0], POLLIN, 0};
    const int ready = left.count() > 0 ? ::poll(&readable, 1, static_cast<int>(left.count())) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    char buffer[4096];
    const ssize_t length = ::read(pipe[0], buffer, sizeof buffer);
    if (length < 0 && errno == EINTR) continue;
    out.late = length < 0;
    if (length <= 0) break;
    out.text.append(buffer, static_cast<std::size_t>(length));
  }
  ::close(pipe[0]);
  if (out.late) {
    ::kill(pid, SIGKILL);
    out.text += "killed: it took more than " + std::to_string(patience.count()) + " ms";
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  out.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return out;
}

std::vector<std::string> rules(const std::string& listing) {
  std::vector<std::string> out;
  std::istringstream lines(listing);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("-A ", 0) == 0) out.push_back(line);
  }
  return out;
}

std::string mark() {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "0x%x/0x%x", netdriver::kVerdictMark,
                netdriver::kMarkMask);
  return text.data();
}

}  // namespace

FirewallState ensure_docker_user(std::chrono::milliseconds patience) {
  FirewallState state;
  const std::string bridges = std::string(netdriver::kBridgePrefix) + "+";
  const std::vector<std::string> jumps = {"-A DOCKER-USER -i " + bridges + " -j AGENTGATE",
                                          "-A DOCKER-USER -o " + bridges + " -j AGENTGATE"};
  const std::vector<std::string> verdicts = {"-A AGENTGATE -m mark --mark " + mark() + " -j ACCEPT",
                                             "-A AGENTGATE -j DROP"};
  for (const char* tool :
       {"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"}) {
    const auto iptables = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.begin(), {tool, "-w", "10"});
      return run(arguments, patience);
    };
    // Legacy tables come into being by being looked at; look only where they are.
    if (std::string(tool).find("legacy") != std::string::npos) {
      const char* tables =
          tool[2] == '6' ? "/proc/net/ip6_tables_names" : "/proc/net/ip_tables_names";
      std::FILE* file = std::fopen(tables, "re");
      char line[64] = {};
      const bool any = file != nullptr && std::fgets(line, sizeof line, file) != nullptr;
      if (file != nullptr) std::fclose(file);
      if (!any) continue;
    }
    const Output user = iptables({"-S", "DOCKER-USER"});
    if (user.late) state.problems.push_back(std::string(tool) + ": " + user.text);
    if (user.status != 0) continue;  // no such tool, or no such chain
    const auto wanted_first = [&](const std::string& listing,
                                  const std::vector<std::string>& want) {
      const auto have = rules(listing);
      return have.size() >= want.size() && std::equal(want.begin(), want.end(), have.begin());
    };
    const Output own = iptables({"-S", "AGENTGATE"});
    if (own.status == 0 && rules(own.text) == verdicts && wanted_first(user.text, jumps)) {
      state.present.emplace_back(tool);
      continue;
    }
    bool good = true;
    const auto must = [&](std::vector<std::string> arguments) {
      std::string what = tool;
      for (const auto& argument : arguments) what += " " + argument;
      const Output done = iptables(std::move(arguments));
      if (done.status != 0 && good) {
        good = false;
        state.problems.push_back(what + ": " + done.text);
      }
    };
    // The chain is complete before anything jumps to it; a flushed chain of ours returns nothing
    // in the meantime that layer 3 has not judged.
    if (own.status != 0) must({"-N", "AGENTGATE"});
    if (rules(own.text) != verdicts) {
      must({"-F", "AGENTGATE"});
      must({"-A", "AGENTGATE", "-m", "mark", "--mark", mark(), "-j", "ACCEPT"});
      must({"-A", "AGENTGATE", "-j", "DROP"});
    }
    for (const char* direction : {"-o", "-i"}) {
      for (int i = 0; i < 16; ++i) {  // whoever puts in more, and faster, is not to keep us here
        if (iptables({"-D", "DOCKER-USER", direction, bridges, "-j", "AGENTGATE"}).status != 0) {
          break;
        }
      }
      must({"-I", "DOCKER-USER", "1", direction, bridges, "-j", "AGENTGATE"});
    }
    if (good) state.present.emplace_back(tool);
  }
  return state;
}

}  // namespace agentgate::host

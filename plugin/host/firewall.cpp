// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/host/firewall.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <sstream>

#include "netdriver/gate.h"
#include "plugin/process/process.h"

namespace agentgate::host {
namespace {

struct Output {
  int status = -1;
  std::string text;     // what it said
  std::string problem;  // why it could not be run, or did not end
};

Output run(const std::vector<std::string>& argv, std::chrono::milliseconds patience) {
  process::Child::Options options;
  options.err = process::Child::Output::kCapture;
  auto child = process::Child::start(argv, options, nullptr);
  if (!child) {
    // A host has one kind of iptables or the other.
    const bool absent = child.error().code == ENOENT;
    return {-1, "", absent ? "" : child.error().to_string()};
  }
  const auto ended = child->wait(nullptr, patience);
  if (!ended) {
    return {-1, "", "killed: it took more than " + std::to_string(patience.count()) + " ms"};
  }
  return {ended->code, child->out() + child->err(), ""};
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
    if (!user.problem.empty()) state.problems.push_back(std::string(tool) + ": " + user.problem);
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
        state.problems.push_back(what + ": " + done.text + done.problem);
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

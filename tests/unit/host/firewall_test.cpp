// SPDX-License-Identifier: GPL-2.0-or-later
//
// ensure_docker_user() against scripts in place of iptables; on real tables: tests/e2e.
#include "plugin/host/firewall.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace agentgate::host {
namespace {

using namespace std::chrono_literals;

class FirewallTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/agentgate-firewall-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory = pattern;
    path = std::getenv("PATH");
    ASSERT_EQ(::setenv("PATH", (directory.string() + ":" + path).c_str(), 1), 0);
    // None of the machine's own is run.
    for (const char* tool :
         {"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"}) {
      script(tool, "exit 1");
    }
  }
  void TearDown() override {
    ::setenv("PATH", path.c_str(), 1);
    std::filesystem::remove_all(directory);
  }
  void script(const std::string& tool, const std::string& text) const {
    const auto file = directory / tool;
    std::ofstream(file) << "#!/bin/sh\necho \"$@\" >>" << (directory / "calls").string() << "\n"
                        << text << "\n";
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  }
  [[nodiscard]] std::string calls() const {
    std::ifstream in(directory / "calls");
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::filesystem::path directory;
  std::string path;
};

TEST_F(FirewallTest, WithoutTheChainNothingIsDone) {
  const FirewallState state = ensure_docker_user();
  EXPECT_TRUE(state.present.empty());
  EXPECT_TRUE(state.problems.empty());
  EXPECT_EQ(calls().find("-I"), std::string::npos) << calls();
}

TEST_F(FirewallTest, APairThatIsThereStays) {
  script("iptables-nft",
         "case \"$*\" in\n"
         "*'-S DOCKER-USER') printf -- '-N DOCKER-USER\\n-A DOCKER-USER -i agn+ -j AGENTGATE\\n"
         "-A DOCKER-USER -o agn+ -j AGENTGATE\\n-A DOCKER-USER -j RETURN\\n' ;;\n"
         "*'-S AGENTGATE') printf -- '-N AGENTGATE\\n-A AGENTGATE -m mark --mark "
         "0xa60000/0xff0000 -j ACCEPT\\n-A AGENTGATE -j DROP\\n' ;;\n"
         "esac");
  const FirewallState state = ensure_docker_user();
  EXPECT_EQ(calls().find("-I"), std::string::npos) << calls();
  EXPECT_EQ(state.present, std::vector<std::string>{"iptables-nft"});
}

TEST_F(FirewallTest, WhatHangsIsKilledAndSaid) {
  script("iptables-nft", "exec sleep 100");
  const auto start = std::chrono::steady_clock::now();
  const FirewallState state = ensure_docker_user(3000ms);  // enough for the other scripts to start
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  ASSERT_EQ(state.problems.size(), 1U);
  EXPECT_EQ(state.problems[0], "iptables-nft: killed: it took more than 3000 ms");
  EXPECT_TRUE(state.present.empty());
}

// Not its output counts, but its end.
TEST_F(FirewallTest, WhatHangsWithoutOutputIsKilledToo) {
  script("iptables-nft", "exec sleep 100 >&- 2>&-");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(ensure_docker_user(3s).problems.size(), 1U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 60s);
}

TEST_F(FirewallTest, AToolThatCannotBeRunIsAProblemAndAnAbsentOneIsNone) {
  std::filesystem::permissions(directory / "iptables-nft", std::filesystem::perms::owner_read);
  ::setenv("PATH", directory.c_str(), 1);
  std::filesystem::remove(directory / "ip6tables-nft");
  const FirewallState state = ensure_docker_user();
  ASSERT_EQ(state.problems.size(), 1U);
  EXPECT_NE(state.problems[0].find("EACCES"), std::string::npos) << state.problems[0];
}

TEST_F(FirewallTest, ADeletionThatNeverEndsDoes) {
  script("iptables-nft", "case \"$*\" in *'-S AGENTGATE') exit 1 ;; esac");
  const FirewallState state = ensure_docker_user();
  EXPECT_EQ(state.present, std::vector<std::string>{"iptables-nft"});
  EXPECT_NE(calls().find("-I DOCKER-USER 1 -i agn+ -j AGENTGATE"), std::string::npos) << calls();
}

}  // namespace
}  // namespace agentgate::host

// SPDX-License-Identifier: GPL-2.0-or-later
//
// The resolver against a real dnsmasq, both in a network namespace of the test.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "plugin/policy/policy.h"
#include "tests/support/netns.h"

namespace agentgate::policy {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Arguments = std::vector<std::string>;

constexpr const char* kDnsmasq = "/usr/sbin/dnsmasq";
constexpr const char* kServer = "127.0.0.1:5353";
constexpr const char* kSilent = "127.0.0.2:5353";

// A dnsmasq that knows what stands in `hosts` (as in /etc/hosts) and in `more`, and says NXDOMAIN
// to everything else below .test.
class Dnsmasq {
 public:
  Dnsmasq(const test::NetNamespace& ns, const std::string& hosts, const Arguments& more = {}) {
    char made[] = "/tmp/agentgate-dns-XXXXXX";
    if (::mkdtemp(made) == nullptr) throw std::runtime_error("mkdtemp");
    directory_ = made;
    std::ofstream(directory_ / "hosts") << hosts;
    Arguments argv{kDnsmasq,
                   "--keep-in-foreground",
                   "--conf-file=/dev/null",
                   "--no-resolv",
                   "--no-hosts",
                   "--user=root",
                   "--pid-file=",
                   "--port=5353",
                   "--listen-address=127.0.0.1",
                   "--bind-interfaces",
                   "--local=/test/",
                   "--local-ttl=60",
                   "--log-facility=-",
                   "--addn-hosts=" + (directory_ / "hosts").string()};
    argv.insert(argv.end(), more.begin(), more.end());
    std::vector<char*> pointers;
    for (auto& argument : argv) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const std::string log = directory_ / "log";
    pid_ = ::fork();
    if (pid_ == 0) {
      const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
      ::dup2(out, 1);
      ::dup2(out, 2);
      if (::setns(ns.fd(), CLONE_NEWNET) != 0) ::_exit(126);
      ::execv(pointers[0], pointers.data());
      ::_exit(127);
    }
    // Up when it listens: port 5353 is 14E9.
    for (int i = 0; i < 200; ++i) {
      if (ns.exec({"/bin/sh", "-c", "grep -q ':14E9 00000000:0000 0A' /proc/net/tcp"}).status == 0)
        return;
      std::this_thread::sleep_for(milliseconds(10));
    }
    std::ostringstream text;
    text << std::ifstream(log).rdbuf();
    ADD_FAILURE() << "dnsmasq does not listen: " << text.str();
  }
  ~Dnsmasq() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }
  Dnsmasq(const Dnsmasq&) = delete;
  Dnsmasq& operator=(const Dnsmasq&) = delete;

 private:
  std::filesystem::path directory_;
  pid_t pid_ = -1;
};

class ResolverTest : public test::KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    if (!std::filesystem::exists(kDnsmasq))
      GTEST_SKIP() << "needs " << kDnsmasq << " (dnsmasq-base)";
    ns_ = std::make_unique<test::NetNamespace>();
  }
  Resolution resolve(const std::vector<std::string>& names,
                     const std::vector<std::string>& servers = {kServer},
                     milliseconds timeout = milliseconds(5000)) {
    Resolution out;
    ns_->run([&] {
      const auto start = Clock::now();
      out = Resolver({servers, timeout}).resolve(names);
      took_ = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    });
    return out;
  }
  std::unique_ptr<test::NetNamespace> ns_;
  milliseconds took_{};
};

// A socket that takes questions and never answers.
class Silent {
 public:
  explicit Silent(const test::NetNamespace& ns) {
    ns.run([&] {
      fd_ = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
      sockaddr_in at{};
      at.sin_family = AF_INET;
      at.sin_port = htons(5353);
      ::inet_pton(AF_INET, "127.0.0.2", &at.sin_addr);
      if (::bind(fd_, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0)
        throw std::runtime_error("bind");
    });
  }
  ~Silent() { ::close(fd_); }
  Silent(const Silent&) = delete;
  Silent& operator=(const Silent&) = delete;
  // How many questions came.
  [[nodiscard]] unsigned questions() const {
    char buffer[512];
    unsigned count = 0;
    while (::recv(fd_, buffer, sizeof buffer, MSG_DONTWAIT) > 0) ++count;
    return count;
  }

 private:
  int fd_ = -1;
};

std::string addresses(const Resolution& resolution, const std::string& name) {
  const auto at = resolution.names.find(name);
  if (at == resolution.names.end()) return "missing";
  std::string out = at->second.error;
  for (const auto& address : at->second.addresses)
    out += (out.empty() ? "" : " ") + address.address.to_string();
  return out;
}

TEST_F(ResolverTest, FindsBothFamiliesAndSorts) {
  const Dnsmasq server(*ns_,
                       "192.0.2.9 both.test\n2001:db8::9 both.test\n192.0.2.1 both.test\n"
                       "192.0.2.4 four.test\n2001:db8::6 six.test\n");
  const auto before = std::chrono::system_clock::now() - std::chrono::seconds(1);
  const Resolution out = resolve({"both.test", "four.test", "six.test", "four.test"});
  EXPECT_EQ(out.names.size(), 3U);
  EXPECT_EQ(addresses(out, "both.test"), "192.0.2.1 192.0.2.9 2001:db8::9");
  EXPECT_EQ(addresses(out, "four.test"), "192.0.2.4");
  EXPECT_EQ(addresses(out, "six.test"), "2001:db8::6");
  for (const auto& [name, resolved] : out.names) {
    EXPECT_EQ(resolved.ttl, std::chrono::seconds(60)) << name;
    EXPECT_GE(resolved.resolved_at, before);
    EXPECT_LE(resolved.resolved_at, std::chrono::system_clock::now());
    for (const auto& address : resolved.addresses)
      EXPECT_EQ(address.last_seen, resolved.resolved_at);
  }
  EXPECT_EQ(resolution_from_json(to_json(out)).value(), out);
  EXPECT_LT(took_, milliseconds(1000));
}

TEST_F(ResolverTest, TakesTheLeastTtlOfTheChain) {
  const Dnsmasq server(
      *ns_, "",
      {"--host-record=end.test,192.0.2.1,2001:db8::1,60", "--cname=b.test,end.test,17",
       "--cname=a.test,b.test,42", "--host-record=short.test,192.0.2.2,9",
       "--cname=long.test,short.test,300"});
  const Resolution out = resolve({"a.test", "long.test", "end.test"});
  EXPECT_EQ(addresses(out, "a.test"), "192.0.2.1 2001:db8::1");
  EXPECT_EQ(out.names.at("a.test").ttl, std::chrono::seconds(17));
  EXPECT_EQ(addresses(out, "long.test"), "192.0.2.2");
  EXPECT_EQ(out.names.at("long.test").ttl, std::chrono::seconds(9));
  EXPECT_EQ(out.names.at("end.test").ttl, std::chrono::seconds(60));
}

TEST_F(ResolverTest, TellsFailuresApart) {
  const Dnsmasq server(*ns_, "192.0.2.1 good.test\n", {"--txt-record=text.test,hello"});
  const Resolution out = resolve({"good.test", "nowhere.test", "text.test", "elsewhere.example"});
  EXPECT_EQ(addresses(out, "good.test"), "192.0.2.1");
  EXPECT_EQ(addresses(out, "nowhere.test"), "the name does not exist (NXDOMAIN)");
  EXPECT_EQ(addresses(out, "text.test"), "the name has no address");
  // c-ares 1.34 keeps the REFUSED, 1.18 does not.
  EXPECT_NE(addresses(out, "elsewhere.example").find("refuse"), std::string::npos)
      << addresses(out, "elsewhere.example");
  EXPECT_LT(took_, milliseconds(2000));
}

TEST_F(ResolverTest, TakesAnswersThatNeedTcp) {
  std::string hosts;
  for (int i = 1; i <= 200; ++i) {
    hosts += "198.51.100." + std::to_string(i) + " many.test\n2001:db8::" + std::to_string(i) +
             " many.test\n";
  }
  const Dnsmasq server(*ns_, hosts);
  const Resolution out = resolve({"many.test"});
  EXPECT_EQ(out.names.at("many.test").addresses.size(), 400U) << out.names.at("many.test").error;
  EXPECT_TRUE(std::is_sorted(out.names.at("many.test").addresses.begin(),
                             out.names.at("many.test").addresses.end(),
                             [](const auto& a, const auto& b) { return a.address < b.address; }));
}

TEST_F(ResolverTest, TakesTheLargestPolicy) {
  std::string hosts;
  std::vector<std::string> names;
  for (int i = 0; i < 256; ++i) {
    names.push_back("n" + std::to_string(i) + ".test");
    hosts += "198.51.100." + std::to_string(i) + " " + names.back() + "\n";
  }
  const Dnsmasq server(*ns_, hosts);
  const Resolution out = resolve(names);
  ASSERT_EQ(out.names.size(), 256U);
  for (int i = 0; i < 256; ++i) {
    EXPECT_EQ(addresses(out, names[static_cast<std::size_t>(i)]),
              "198.51.100." + std::to_string(i));
  }
  std::cout << "256 names: " << took_.count() << " ms\n";
  EXPECT_LT(took_, milliseconds(4000));
}

TEST_F(ResolverTest, RotationKeepsTheOldAddressForItsGraceTime) {
  ParseResult parsed = parse(
      R"({"version":1,"grace_seconds":600,"allow":[{"name":"turn.test","services":["tcp/443"]}]})",
      "web", "web.json");
  ASSERT_TRUE(parsed.errors.empty());
  Resolution known;
  {
    const Dnsmasq server(*ns_, "192.0.2.1 turn.test\n");
    known = merge(parsed.policy, {}, resolve({"turn.test"}), std::chrono::system_clock::now());
  }
  EXPECT_EQ(addresses(known, "turn.test"), "192.0.2.1");
  const Dnsmasq server(*ns_, "192.0.2.2 turn.test\n");
  const auto now = std::chrono::system_clock::now();
  const Resolution fresh = resolve({"turn.test"});
  EXPECT_EQ(addresses(fresh, "turn.test"), "192.0.2.2");
  EXPECT_EQ(addresses(merge(parsed.policy, known, fresh, now), "turn.test"), "192.0.2.1 192.0.2.2");
  EXPECT_EQ(
      addresses(merge(parsed.policy, known, fresh, now + std::chrono::seconds(700)), "turn.test"),
      "192.0.2.2");
}

TEST_F(ResolverTest, DeadAndSilentServersEndInTime) {
  // Nothing listens there. c-ares gives one query's ICMP error to another, so either text may come.
  const Resolution refused = resolve({"a.test"}, {"127.0.0.3:5353"}, milliseconds(1500));
  const std::set<std::string> texts{"no resolver can be reached, or all refuse the question",
                                    "no answer in time"};
  EXPECT_EQ(texts.count(addresses(refused, "a.test")), 1U) << addresses(refused, "a.test");
  EXPECT_LT(took_, milliseconds(1700));

  const Silent silent(*ns_);
  const Resolution out = resolve({"a.test", "b.test"}, {kSilent}, milliseconds(600));
  EXPECT_EQ(addresses(out, "a.test"), "no answer in time");
  EXPECT_EQ(addresses(out, "b.test"), "no answer in time");
  EXPECT_GE(took_, milliseconds(500));
  EXPECT_LT(took_, milliseconds(900));
  EXPECT_GE(silent.questions(), 4U);  // A and AAAA of both
}

TEST_F(ResolverTest, AsksTheNextServer) {
  const Silent silent(*ns_);
  const Dnsmasq server(*ns_, "192.0.2.1 a.test\n192.0.2.2 b.test\n");
  const Resolution out =
      resolve({"a.test", "b.test"}, {"127.0.0.3:5353", kSilent, kServer}, milliseconds(2000));
  EXPECT_EQ(addresses(out, "a.test"), "192.0.2.1");
  EXPECT_EQ(addresses(out, "b.test"), "192.0.2.2");
  EXPECT_LT(took_, milliseconds(1900));
  EXPECT_GE(silent.questions(), 1U);
}

TEST_F(ResolverTest, ASilentServerIsNotFloodedWithAllNames) {
  const Silent silent(*ns_);
  std::vector<std::string> names;
  for (int i = 0; i < 200; ++i) names.push_back("n" + std::to_string(i) + ".test");
  const Resolution out = resolve(names, {kSilent}, milliseconds(200));
  EXPECT_EQ(out.names.size(), 200U);
  for (const auto& [name, resolved] : out.names)
    EXPECT_EQ(resolved.error, "no answer in time") << name;
  EXPECT_LT(took_, milliseconds(600));
  const unsigned questions = silent.questions();
  EXPECT_GE(questions, 128U);
  EXPECT_LE(questions, 3 * 128U);  // 64 names, A and AAAA, and what was asked again
}

TEST_F(ResolverTest, BadServerListIsAnErrorOfEveryName) {
  const Resolution out = resolve({"a.test"}, {"not an address"});
  EXPECT_NE(out.names.at("a.test").error.find("resolver list 'not an address'"), std::string::npos)
      << out.names.at("a.test").error;
  EXPECT_TRUE(resolve({}).names.empty());
}

TEST_F(ResolverTest, LeavesMappedAddressesOut) {
  const Dnsmasq server(
      *ns_, "::ffff:192.0.2.1 mapped.test\n192.0.2.9 half.test\n::ffff:192.0.2.1 half.test\n");
  const Resolution out = resolve({"mapped.test", "half.test"});
  EXPECT_EQ(addresses(out, "mapped.test"), "the name has no address");
  EXPECT_EQ(addresses(out, "half.test"), "192.0.2.9");
}

TEST_F(ResolverTest, NeverReadsEtcHosts) {
  const Dnsmasq server(*ns_, "192.0.2.1 a.test\n");
  std::ifstream file("/etc/hosts");
  std::string name;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string address;
    std::string word;
    words >> address;
    // c-ares answers localhost itself, as RFC 6761 says.
    while (words >> word) {
      if (word.find("localhost") == std::string::npos) name = word;
    }
  }
  if (name.empty()) GTEST_SKIP() << "/etc/hosts names nothing but localhost";
  const Resolution out = resolve({name});
  EXPECT_TRUE(out.names.at(name).addresses.empty()) << name << " came from /etc/hosts";
}

}  // namespace
}  // namespace agentgate::policy

// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using Time = std::chrono::system_clock::time_point;

Policy good(const std::string& text) {
  ParseResult result = parse(text, "web", "web.json");
  EXPECT_TRUE(result.errors.empty()) << (result.errors.empty() ? "" : result.errors.front());
  return std::move(result.policy);
}
IpAddress ip(const std::string& text) { return IpAddress::parse(text).value(); }

Resolution resolved(const std::string& name, const std::vector<std::string>& addresses,
                    const std::string& error = "") {
  Resolution out;
  for (const auto& address : addresses) out.names[name].addresses.push_back({ip(address), Time{}});
  out.names[name].error = error;
  return out;
}

// What the gate decides, said without its data structures: deny, then private, then the
// always-deny set, then allow.
template <class Address>
bool reachable(const netdriver::PolicyFamily<Address>& family,
               const std::vector<AddressRange<Address>>& always, const Address& address,
               const Service& service) {
  const auto in = [&](const AddressRange<Address>& range) {
    return range.first <= address && address <= range.last;
  };
  const auto hit = [&](const std::vector<netdriver::AllowEntry<Address>>& list) {
    return std::any_of(list.begin(), list.end(), [&](const auto& box) {
      return in(box.addresses) && box.protocol == service.protocol &&
             box.ports.first <= service.ports.first && service.ports.first <= box.ports.last;
    });
  };
  if (std::any_of(family.deny.begin(), family.deny.end(), in)) return false;
  if (hit(family.private_entries)) return true;
  if (std::any_of(always.begin(), always.end(), in)) return false;
  return hit(family.allow);
}
bool reachable(const netdriver::PolicySpec& spec, const std::string& address, const char* service) {
  const IpAddress where = ip(address);
  const Service what = Service::parse(service).value();
  return where.is_v4() ? reachable(spec.v4, netdriver::always_deny4(), where.v4(), what)
                       : reachable(spec.v6, netdriver::always_deny6(), where.v6(), what);
}

TEST(Compile, AllowsNamesPrefixesAndResolvers) {
  const Policy policy = good(R"({"version":1,"reject":false,
"allow":[{"name":"a.example","services":["tcp/443"]},{"cidr":"192.0.2.0/24","services":["tcp/80","udp/80"]}],
"resolvers":["9.9.9.9","2620:fe::fe"]})");
  const Compiled compiled =
      compile(policy, resolved("a.example", {"198.51.100.1", "2001:db8::1"}), {});
  EXPECT_TRUE(compiled.unresolved.empty());
  EXPECT_TRUE(compiled.notes.empty());
  EXPECT_EQ(compiled.spec.name, "web");
  EXPECT_FALSE(compiled.spec.reject);
  EXPECT_EQ(compiled.spec, netdriver::normalise(compiled.spec));
  const auto& spec = compiled.spec;
  for (const auto& [address, service] :
       std::vector<std::pair<const char*, const char*>>{{"198.51.100.1", "tcp/443"},
                                                        {"2001:db8::1", "tcp/443"},
                                                        {"192.0.2.200", "tcp/80"},
                                                        {"192.0.2.0", "udp/80"},
                                                        {"9.9.9.9", "udp/53"},
                                                        {"9.9.9.9", "tcp/53"},
                                                        {"2620:fe::fe", "udp/53"}}) {
    EXPECT_TRUE(reachable(spec, address, service)) << address << " " << service;
  }
  for (const auto& [address, service] :
       std::vector<std::pair<const char*, const char*>>{{"198.51.100.1", "tcp/80"},
                                                        {"198.51.100.1", "udp/443"},
                                                        {"198.51.100.2", "tcp/443"},
                                                        {"192.0.3.0", "tcp/80"},
                                                        {"9.9.9.9", "tcp/443"},
                                                        {"8.8.8.8", "udp/53"},
                                                        {"10.0.0.1", "tcp/80"}}) {
    EXPECT_FALSE(reachable(spec, address, service)) << address << " " << service;
  }
}

TEST(Compile, OfAnEmptyPolicyOpensNothing) {
  const Compiled compiled = compile(good("{\"version\":1}"), {}, {});
  EXPECT_EQ(compiled.spec.v4, netdriver::PolicyFamily<Ipv4Address>{});
  EXPECT_EQ(compiled.spec.v6, netdriver::PolicyFamily<Ipv6Address>{});
}

TEST(Compile, DenyWinsOverAllowPrivateAndResolvers) {
  const Policy policy = good(R"({"version":1,
"allow":[{"cidr":"192.0.2.0/24","services":["tcp/1-100"]},{"cidr":"2001:db8::/32","services":["tcp/443"]}],
"private":[{"address":"10.0.0.5","service":"tcp/22"},{"address":"10.0.0.5","service":"tcp/23"},{"address":"10.0.0.6","service":"tcp/22"}],
"resolvers":["9.9.9.9","10.0.0.53"],
"deny":[{"cidr":"192.0.2.128/25"},{"cidr":"192.0.2.0/28","services":["tcp/50-60"]},
{"cidr":"10.0.0.6"},{"cidr":"10.0.0.5","services":["tcp/23"]},{"cidr":"9.9.9.9","services":["tcp/53"]},
{"cidr":"2001:db8:1::/48"}]})");
  const auto spec = compile(policy, {}, {}).spec;
  EXPECT_TRUE(reachable(spec, "192.0.2.0", "tcp/49"));
  EXPECT_FALSE(reachable(spec, "192.0.2.0", "tcp/50"));
  EXPECT_FALSE(reachable(spec, "192.0.2.15", "tcp/60"));
  EXPECT_TRUE(reachable(spec, "192.0.2.15", "tcp/61"));
  EXPECT_TRUE(reachable(spec, "192.0.2.16", "tcp/55"));
  EXPECT_FALSE(reachable(spec, "192.0.2.128", "tcp/1"));
  EXPECT_TRUE(reachable(spec, "10.0.0.5", "tcp/22"));
  EXPECT_FALSE(reachable(spec, "10.0.0.5", "tcp/23"));
  EXPECT_FALSE(reachable(spec, "10.0.0.6", "tcp/22"));
  EXPECT_TRUE(reachable(spec, "9.9.9.9", "udp/53"));
  EXPECT_FALSE(reachable(spec, "9.9.9.9", "tcp/53"));
  EXPECT_TRUE(reachable(spec, "2001:db8::1", "tcp/443"));
  EXPECT_FALSE(reachable(spec, "2001:db8:1::1", "tcp/443"));
}

TEST(Compile, PrivateResolversAreNarrowExceptions) {
  const auto spec =
      compile(good(R"({"version":1,"resolvers":["10.0.0.53","fd00::53"]})"), {}, {}).spec;
  for (const char* address : {"10.0.0.53", "fd00::53"}) {
    EXPECT_TRUE(reachable(spec, address, "udp/53"));
    EXPECT_TRUE(reachable(spec, address, "tcp/53"));
    EXPECT_FALSE(reachable(spec, address, "tcp/443"));
  }
  EXPECT_FALSE(reachable(spec, "10.0.0.54", "udp/53"));
  EXPECT_TRUE(spec.v4.allow.empty());
  EXPECT_EQ(spec.v4.private_entries.size(), 2U);
}

TEST(Compile, LeavesRebindingAnswersOut) {
  const Policy policy = good(
      R"({"version":1,"allow":[{"name":"a.example","services":["tcp/443"]},{"name":"a.example","services":["tcp/80"]}]})");
  const Compiled compiled =
      compile(policy,
              resolved("a.example", {"10.0.0.1", "127.0.0.1", "169.254.169.254", "198.51.100.1",
                                     "203.0.113.7", "::1", "::ffff:198.51.100.2", "fd00:ec2::254",
                                     "2001:db8::1", "2001:db8::7"}),
              {ip("203.0.113.7"), ip("2001:db8::7")});
  EXPECT_TRUE(compiled.unresolved.empty());
  EXPECT_EQ(compiled.notes,
            (std::vector<std::string>{
                "a.example: 10.0.0.1 is in the always-deny set and is left out",
                "a.example: 127.0.0.1 is in the always-deny set and is left out",
                "a.example: 169.254.169.254 is in the always-deny set and is left out",
                "a.example: 203.0.113.7 is an address of this host and is left out",
                "a.example: ::1 is in the always-deny set and is left out",
                "a.example: ::ffff:198.51.100.2 is in the always-deny set and is left out",
                "a.example: fd00:ec2::254 is in the always-deny set and is left out",
                "a.example: 2001:db8::7 is an address of this host and is left out"}));
  ASSERT_EQ(compiled.spec.v4.allow.size(), 2U);
  for (const auto& box : compiled.spec.v4.allow) {
    EXPECT_EQ(box.addresses.first, ip("198.51.100.1").v4());
    EXPECT_EQ(box.addresses.last, ip("198.51.100.1").v4());
  }
  EXPECT_EQ(compiled.spec.v6.allow.size(), 2U);
  EXPECT_TRUE(compiled.spec.v4.private_entries.empty());
}

TEST(Compile, NamesWithoutUsableAddress) {
  const Policy policy = good(R"({"version":1,"allow":[
{"name":"never.example","services":["tcp/443"]},{"name":"inside.example","services":["tcp/443"]},
{"name":"may.example","services":["tcp/443"],"optional":true},
{"name":"both.example","services":["tcp/443"],"optional":true},{"name":"both.example","services":["tcp/80"]},
{"name":"old.example","services":["tcp/443"]}]})");
  Resolution resolution = resolved("inside.example", {"10.0.0.1"});
  resolution.names["may.example"].error = "the name does not exist (NXDOMAIN)";
  resolution.names["old.example"] =
      resolved("old.example", {"198.51.100.1"}, "no answer in time").names["old.example"];
  const Compiled compiled = compile(policy, resolution, {});
  EXPECT_EQ(compiled.unresolved, (std::vector<std::string>{"never.example: has no usable address",
                                                           "inside.example: has no usable address",
                                                           "both.example: has no usable address"}));
  EXPECT_EQ(compiled.notes,
            (std::vector<std::string>{
                "inside.example: 10.0.0.1 is in the always-deny set and is left out",
                "may.example: the name does not exist (NXDOMAIN)",
                "old.example: no answer in time; its last good addresses are kept"}));
  EXPECT_TRUE(reachable(compiled.spec, "198.51.100.1", "tcp/443"));
}

// Random policies over a small universe, judged rule by rule against judged through the boxes.
TEST(Compile, DecidesAsTheRulesSay) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const auto pick = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
    const auto cidr = [&](const char* net) {
      const unsigned length = 28 + pick(5);
      const unsigned host = pick(16) & (0xFFU << (32 - length));
      return std::string(net) + std::to_string(host) + "/" + std::to_string(length);
    };
    const auto service = [&] {
      const unsigned first = 1 + pick(6);
      const std::string text = std::string(pick(2) == 0 ? "tcp/" : "udp/") + std::to_string(first);
      const unsigned last = first + pick(4);
      return last > first ? text + "-" + std::to_string(last) : text;
    };
    std::string text = "{\"version\":1,\"allow\":[";
    for (unsigned i = 0, n = pick(6); i < n; ++i) {
      text += (i > 0 ? "," : "") + ("{\"cidr\":\"" + cidr("192.0.2.")) + "\",\"services\":[\"" +
              service() + "\"]}";
    }
    text += "],\"private\":[";
    for (unsigned i = 0, n = pick(4); i < n; ++i) {
      text += (i > 0 ? "," : "") + ("{\"address\":\"10.0.0." + std::to_string(pick(16))) +
              "\",\"service\":\"" + (pick(2) == 0 ? "tcp/" : "udp/") + std::to_string(1 + pick(9)) +
              "\"}";
    }
    text += "],\"deny\":[";
    for (unsigned i = 0, n = pick(4); i < n; ++i) {
      text += (i > 0 ? "," : "") + ("{\"cidr\":\"" + cidr(pick(2) == 0 ? "192.0.2." : "10.0.0.")) +
              "\"" + (pick(2) == 0 ? "" : ",\"services\":[\"" + service() + "\"]") + "}";
    }
    const Policy policy = good(text + "]}");
    const auto spec = compile(policy, {}, {}).spec;
    const auto listed = [](const std::vector<PrefixRule>& rules, const Ipv4Address& address,
                           const Service& what) {
      return std::any_of(rules.begin(), rules.end(), [&](const PrefixRule& rule) {
        return std::get<Ipv4Prefix>(rule.prefix).contains(address) &&
               (rule.services.empty() ||
                std::any_of(rule.services.begin(), rule.services.end(), [&](const Service& s) {
                  return s.protocol == what.protocol && s.ports.first <= what.ports.first &&
                         what.ports.first <= s.ports.last;
                }));
      });
    };
    for (const char* net : {"192.0.2.", "10.0.0."}) {
      for (unsigned host = 0; host < 18; ++host) {
        const Ipv4Address address = ip(net + std::to_string(host)).v4();
        for (std::uint16_t port = 1; port <= 10; ++port) {
          for (const Protocol protocol : {Protocol::tcp, Protocol::udp}) {
            const Service what{protocol, {port, port}};
            const bool expected = !listed(policy.deny, address, what) &&
                                  (listed(policy.prefixes, address, what) ||
                                   listed(policy.private_rules, address, what));
            ASSERT_EQ(reachable(spec.v4, netdriver::always_deny4(), address, what), expected)
                << text << "\n"
                << address.to_string() << " " << what.to_string();
          }
        }
      }
    }
  }
}

TEST(ConflictsWithHost, NamesTheEntryAndTheAddress) {
  const Policy policy = good(R"({"version":1,
"allow":[{"cidr":"203.0.113.0/24","services":["tcp/443"]},{"cidr":"2001:db8::/32","services":["tcp/443"]}],
"private":[{"address":"10.0.0.1","service":"tcp/22"}],
"resolvers":["10.0.0.1"]})");
  EXPECT_TRUE(conflicts_with_host(policy, {}).empty());
  EXPECT_TRUE(
      conflicts_with_host(policy, {ip("10.0.0.2"), ip("198.51.100.1"), ip("2001:db9::1")}).empty());
  EXPECT_EQ(conflicts_with_host(policy, {ip("203.0.113.9"), ip("2001:db8::9"), ip("10.0.0.1")}),
            (std::vector<std::string>{
                "web.json:2:18: covers 203.0.113.9, an address of this host; the host is never "
                "reachable: narrow the entry",
                "web.json:2:67: covers 2001:db8::9, an address of this host; the host is never "
                "reachable: narrow the entry",
                "web.json:3:23: covers 10.0.0.1, an address of this host; the host is never "
                "reachable: narrow the entry",
                "policy web: resolver 10.0.0.1 is an address of this host; the host is never "
                "reachable: name another resolver"}));
}

TEST(ResolvConf, HoldsThreeServers) {
  EXPECT_EQ(resolv_conf(
                good(R"({"version":1,"resolvers":["1.1.1.1","2620:fe::fe","9.9.9.9","8.8.8.8"]})")),
            "# Written by agentgate when the container was armed.\n"
            "nameserver 1.1.1.1\nnameserver 2620:fe::fe\nnameserver 9.9.9.9\n"
            "options ndots:1 timeout:2 attempts:2\n");
}

}  // namespace
}  // namespace agentgate::policy

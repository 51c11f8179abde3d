// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>

#include <algorithm>

#include "plugin/policy/json_tree.h"
#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

ParseResult read(const std::string& text) { return parse(text, "web", "web.json"); }

std::string all(const std::vector<std::string>& lines) {
  std::string out;
  for (const auto& line : lines) out += line + "\n";
  return out;
}

// The policy with one entry in `list`, whose text begins at line 2, column 1.
std::string with(const std::string& list, const std::string& entry) {
  return "{\"version\":1,\"" + list + "\":[\n" + entry + "\n]}";
}

void expect_error(const std::string& text, const std::string& error) {
  const ParseResult result = read(text);
  EXPECT_TRUE(std::any_of(result.errors.begin(), result.errors.end(),
                          [&](const auto& line) { return line.rfind(error, 0) == 0; }))
      << "wanted: " << error << "\ngot: " << all(result.errors) << "for: " << text.substr(0, 300);
}

TEST(Parse, ReadsEveryKey) {
  const ParseResult result = read(R"({
  "version": 1, "description": "the web team", "comment": "2026-11",
  "allow": [
    {"name": "api.example.com", "services": ["tcp/443", "udp/443"], "optional": true, "comment": "c"},
    {"cidr": "192.0.2.0/24", "services": ["tcp/8000-8100"]},
    {"cidr": "2001:db8::/32", "services": ["tcp/443"]}
  ],
  "deny": [{"cidr": "192.0.2.7/32"}, {"cidr": "0.0.0.0/0", "services": ["tcp/25"]}],
  "private": [{"address": "10.0.0.5", "service": "tcp/5432", "comment": "db"}],
  "resolvers": ["1.1.1.1", "10.0.0.53", "2606:4700:4700::1111"],
  "runtimes": ["runsc", "runc"],
  "reject": false, "refresh_seconds": 60, "grace_seconds": 0, "accept_host_resolver": true
})");
  ASSERT_TRUE(result.errors.empty()) << all(result.errors);
  EXPECT_TRUE(result.warnings.empty()) << all(result.warnings);
  const Policy& policy = result.policy;
  EXPECT_EQ(policy.name, "web");
  EXPECT_EQ(policy.description, "the web team");
  ASSERT_EQ(policy.names.size(), 1U);
  EXPECT_EQ(policy.names[0].name, "api.example.com");
  EXPECT_TRUE(policy.names[0].optional);
  EXPECT_EQ(policy.names[0].comment, "c");
  EXPECT_EQ(policy.names[0].services.size(), 2U);
  EXPECT_EQ(policy.names[0].at.line, 4U);
  EXPECT_EQ(policy.names[0].at.column, 14U);
  ASSERT_EQ(policy.prefixes.size(), 2U);
  EXPECT_EQ(std::get<Ipv4Prefix>(policy.prefixes[0].prefix).to_string(), "192.0.2.0/24");
  EXPECT_EQ(policy.prefixes[0].services[0].to_string(), "tcp/8000-8100");
  ASSERT_EQ(policy.deny.size(), 2U);
  EXPECT_TRUE(policy.deny[0].services.empty());
  ASSERT_EQ(policy.private_rules.size(), 1U);
  EXPECT_EQ(policy.private_rules[0].services[0].to_string(), "tcp/5432");
  EXPECT_EQ(policy.resolvers.size(), 3U);
  EXPECT_EQ(policy.runtimes, (std::vector<std::string>{"runsc", "runc"}));
  EXPECT_FALSE(policy.reject);
  EXPECT_EQ(policy.refresh, std::chrono::seconds(60));
  EXPECT_EQ(policy.grace, std::chrono::seconds(0));
  EXPECT_TRUE(policy.accept_host_resolver);
}

TEST(Parse, HasDefaults) {
  const ParseResult result = read("{\"version\":1}");
  ASSERT_TRUE(result.errors.empty()) << all(result.errors);
  EXPECT_FALSE(result.policy.accept_host_resolver);
  EXPECT_EQ(result.policy.runtimes, std::vector<std::string>{"runsc"});
  EXPECT_TRUE(result.policy.reject);
  EXPECT_EQ(result.policy.refresh, std::chrono::seconds(300));
  EXPECT_EQ(result.policy.grace, std::chrono::seconds(3600));
  EXPECT_EQ(all(result.warnings),
            "web.json:1:1: nothing is allowed: a container with this policy reaches nothing\n");
  // printf '{"version":1}' | sha256sum
  EXPECT_EQ(result.policy.revision, "2430f1a2ad29");
}

TEST(Parse, NamesThePlaceOfEachError) {
  const ParseResult result = read(
      "{\n  \"version\": 2,\n  \"allwo\": [],\n  \"reject\": 1,\n"
      "  \"allow\": [ {\"name\": \"A.example.com\", \"services\": [\"tcp/443\", 7]},\n"
      "    {\"cidr\": \"192.0.2.1/24\", \"services\": [ \"tcp/0\" ]}\n  ]\n}");
  EXPECT_EQ(all(result.errors).find("more errors"), std::string::npos);
  std::vector<std::string> places;
  for (const auto& error : result.errors) places.push_back(error.substr(0, error.find(": ")));
  std::sort(places.begin(), places.end());
  EXPECT_EQ(places, (std::vector<std::string>{"web.json:2:14", "web.json:3:3", "web.json:4:13",
                                              "web.json:5:23", "web.json:5:64", "web.json:6:14",
                                              "web.json:6:44"}))
      << all(result.errors);
}

TEST(Parse, RefusesWhatIsNotJson) {
  expect_error("", "web.json:1:1: the file ends in the middle of the JSON");
  expect_error("{\"version\":1", "web.json:1:13: the file ends in the middle of the JSON");
  expect_error("{\"version\":1,\n\"comment\":\"abc", "web.json:2:15: the file ends in the middle");
  expect_error("{\"version\":1,\n}", "web.json:2:1: not JSON at this place");
  expect_error("{\"version\":1}\n x", "web.json:1:14: something stands behind the last '}'");
  expect_error("{\"version\":1} {}", "web.json:1:14: something stands behind the last '}'");
  expect_error("{\n// hm\n\"version\":1}", "web.json:2:1: JSON has no comments");
  expect_error(std::string("{\0\"version\":1}", 14), "web.json:1:2: a NUL byte");
  expect_error("{\"comment\":\"\xff\"}", "web.json:1:13: not JSON at this place");
  expect_error("{\"comment\":\"\xc0\xaf\"}", "web.json:1:13: not JSON at this place");
  expect_error("{\"a\":1e999}", "web.json:1:");
  expect_error("[]", "web.json:1:1: the policy must be an object, this is a list");
  expect_error(std::string(20, '['), "web.json:1:17: nested too deeply");
  expect_error("\"\"", "web.json:1:1: the policy must be an object");
  expect_error(std::string((4U << 20) + 1, ' '), "web.json:1:1: larger than 4 MiB");
}

TEST(Parse, ReportsRepeatedKeysAndGoesOn) {
  const ParseResult result = read(
      "{\"version\":1,\n\"reject\":true,\n\"reject\":false,\n\"deny\":[{\"cidr\":\"192.0.2.0/24\","
      "\"cidr\":\"0.0.0.0/0\"}],\n\"nope\":1}");
  EXPECT_EQ(all(result.errors),
            "web.json:3:1: key 'reject' stands twice; keep one of them\n"
            "web.json:4:32: key 'cidr' stands twice; keep one of them\n"
            "web.json:5:1: unknown key 'nope'; a policy has: version, description, comment, allow, "
            "deny, private, resolvers, runtimes, reject, refresh_seconds, grace_seconds, "
            "accept_host_resolver\n");
}

TEST(Parse, RefusesWrongTypes) {
  for (const char* key : {"allow", "deny", "private", "resolvers", "runtimes"}) {
    expect_error("{\"version\":1,\n\"" + std::string(key) + "\": {}}", "web.json:2:");
    expect_error(with(key, "17"), "web.json:2:1: ");
    expect_error(with(key, "null"), "web.json:2:1: ");
  }
  for (const char* key : {"version", "description", "comment", "reject", "refresh_seconds",
                          "grace_seconds", "accept_host_resolver"}) {
    expect_error("{\"version\":1,\n\"" + std::string(key) + "\": []}", "web.json:2:");
  }
  expect_error("{\"version\":1,\n\"refresh_seconds\": 1.5}",
               "web.json:2:20: \"refresh_seconds\" must be a whole number");
  expect_error("{\"version\":1,\n\"refresh_seconds\": 0}",
               "web.json:2:20: \"refresh_seconds\" must be between 1 and 604800");
  expect_error("{\"version\":1,\n\"grace_seconds\": -1}",
               "web.json:2:18: \"grace_seconds\" must be between 0");
  expect_error("{\"version\":1,\n\"grace_seconds\": 18446744073709551615}", "web.json:2:18: ");
  expect_error("{}", "web.json:1:1: \"version\" is missing");
  expect_error("{\"version\":\"1\"}", "web.json:1:12: \"version\" must be 1");
  expect_error("{\"version\":1,\n\"comment\":\"\\u001b[2J\"}",
               "web.json:2:11: \"comment\" holds control");
  expect_error("{\"version\":1,\n\"comment\":\"" + std::string(1025, 'x') + "\"}",
               "web.json:2:11: \"comment\" is longer");
  expect_error("{\"version\":1,\n\"runtimes\":[]}", "web.json:2:12: \"runtimes\" is empty");
  expect_error(with("runtimes", "\"kata\""), "web.json:2:1: 'kata' is not a runtime");
}

struct BadName {
  const char* name;
  const char* why;
};
TEST(Parse, RefusesNamesThatAreNone) {
  const std::string label64(64, 'a');
  const std::string label63(63, 'a');
  const std::string too_long = label63 + "." + label63 + "." + label63 + "." + std::string(62, 'a');
  for (const BadName& bad : std::initializer_list<BadName>{
           {"*", "allows every name"},
           {"*.", "allows every name"},
           {"*.com", "allows a whole top-level domain"},
           {"**.com", "allows a whole top-level domain"},
           {"*.example.com", "is a wildcard; wildcards need the resolver gateway"},
           {"**.example.com", "is a wildcard"},
           {"***.example.com", "has a '*' inside"},
           {"a*.example.com", "has a '*' inside"},
           {"*.*.example.com", "has a '*' inside"},
           {"https://api.example.com", "is a URL"},
           {"//api.example.com", "is a URL"},
           {"api.example.com/v1", "has a path"},
           {"api.example.com:443", "has a port"},
           {"API.example.com", "has capitals"},
           {"api.example.com.", "ends in a dot"},
           {"api..example.com", "has two dots"},
           {".example.com", "has two dots in a row, or one"},
           {"-a.example.com", "has a label that begins or ends with '-'"},
           {"a-.example.com", "has a label that begins or ends with '-'"},
           {"a_b.example.com", "has characters other than"},
           {"a b.example.com", "has characters other than"},
           {"b\xc3\xbc"
            "cher.example.com",
            "has characters other than"},
           {"localhost", "is a single label"},
           {"com", "is a single label"},
           {"", "is not between 1 and 253"},
           {"192.0.2.1", "is an address"},
           {"192.0.2.0/24", "is an address"},
           {"::1", "is an address"},
           {"1.2.3.4.5", "ends in a number"},
           {"192.0.2.01", "ends in a number"},
           {"127.1", "ends in a number"},
           {"1.0x7f", "ends in a number"},
           {label64.c_str(), "has a label of more than 63"},
           {too_long.c_str(), "is not between 1 and 253"},
       }) {
    const ParseResult result = read(
        with("allow", std::string(R"({"name":")") + bad.name + R"(","services":["tcp/443"]})"));
    ASSERT_EQ(result.errors.size(), 1U) << bad.name << "\n" << all(result.errors);
    EXPECT_EQ(result.errors[0].rfind("web.json:2:9: '", 0), 0U) << result.errors[0];
    EXPECT_NE(result.errors[0].find(bad.why), std::string::npos) << result.errors[0];
    EXPECT_TRUE(result.policy.names.empty());
  }
}

TEST(Parse, TakesNamesThatAreSome) {
  const std::string label63(63, 'a');
  for (const std::string& good :
       {std::string("example.com"), std::string("a.b.c.d.e"), std::string("xn--bcher-kva.example"),
        std::string("0.example.com"), std::string("a--b.example.com"), std::string("3com.x1"),
        label63 + "." + label63 + "." + label63 + "." + std::string(61, 'a')}) {
    const ParseResult result =
        read(with("allow", R"({"name":")" + good + R"(","services":["tcp/443"]})"));
    EXPECT_TRUE(result.errors.empty()) << all(result.errors);
  }
}

TEST(Parse, RefusesEntriesOfAllow) {
  expect_error(with("allow", "{}"),
               "web.json:2:1: an entry of \"allow\" has either \"name\" or \"cidr\"");
  expect_error(with("allow", R"({"name":"a.example","cidr":"192.0.2.0/24","services":["tcp/1"]})"),
               "web.json:2:1: an entry of \"allow\" has either");
  expect_error(with("allow", R"({"name":"a.example"})"), "web.json:2:1: \"services\" is missing");
  expect_error(with("allow", R"({"name":"a.example","services":[]})"),
               "web.json:2:32: \"services\" is empty");
  for (const char* service :
       {"443", "tcp", "tcp/", "tcp/0", "tcp/65536", "tcp/0443", "TCP/443", "icmp/1", "tcp/9-8",
        "tcp/1-", "tcp/-1", "tcp/443 ", "tcp/*", "sctp/1"}) {
    expect_error(
        with("allow", std::string(R"({"name":"a.example","services":[")") + service + "\"]}"),
        std::string("web.json:2:33: '") + service);
  }
  expect_error(with("allow", R"({"cidr":"192.0.2.0/24","services":["tcp/1"],"optional":true})"),
               "web.json:2:56: \"optional\" is for names");
  expect_error(
      with("allow", R"({"cidr":"192.0.2.0/24","services":["tcp/1"],"port":1})"),
      "web.json:2:45: unknown key 'port'; an entry of \"allow\" has: name, cidr, services");
  std::string services;
  for (int i = 1; i <= 33; ++i)
    services += (i > 1 ? "," : "") + ("\"tcp/" + std::to_string(i)) + "\"";
  expect_error(with("allow", R"({"name":"a.example","services":[)" + services + "]}"),
               "web.json:2:32: 33 services; an entry takes 32");
}

TEST(Parse, RefusesPrefixesThatAreNotCanonical) {
  struct Bad {
    const char* cidr;
    const char* mend;
  };
  for (const Bad& bad :
       std::initializer_list<Bad>{{"192.0.2.1/24", "192.0.2.0/24"},
                                  {"192.0.2.0/33", "between 0 and 32"},
                                  {"192.0.2/24", "is not an IPv4"},
                                  {"192.0.02.0/24", "is not"},
                                  {"2001:DB8::/32", "2001:db8::"},
                                  {"2001:db8:0:0::/64", "2001:db8::"},
                                  {"2001:db8::1/64", "2001:db8::/64"},
                                  {"2001:db8::/129", "between 0 and 128"},
                                  {"::ffff:192.0.2.1", "write the IPv4 one, e.g. 192.0.2.1"},
                                  {"example.com", "is not"}}) {
    for (const char* list : {"allow", "deny"}) {
      const ParseResult result =
          read(with(list, std::string(R"({"cidr":")") + bad.cidr + R"(","services":["tcp/443"]})"));
      ASSERT_EQ(result.errors.size(), 1U) << bad.cidr << "\n" << all(result.errors);
      EXPECT_EQ(result.errors[0].rfind("web.json:2:9: ", 0), 0U) << result.errors[0];
      EXPECT_NE(result.errors[0].find(bad.mend), std::string::npos) << result.errors[0];
    }
  }
}

TEST(Parse, RefusesAllowsInTheAlwaysDenySet) {
  for (const char* cidr :
       {"0.0.0.0/0",     "10.0.0.0/8",      "10.1.2.3/32",     "8.0.0.0/5",
        "127.0.0.1",     "169.254.169.254", "172.16.0.0/16",   "192.168.1.0/24",
        "100.64.0.0/10", "224.0.0.1",       "255.255.255.255", "::/0",
        "::1",           "fe80::/64",       "fd00::/16",       "fd00:ec2::254",
        "ff02::1",       "64:ff9b::/96",    "2000::/3",        "168.63.129.16"}) {
    const ParseResult result =
        read(with("allow", std::string(R"({"cidr":")") + cidr + R"(","services":["tcp/443"]})"));
    ASSERT_EQ(result.errors.size(), 1U) << cidr << "\n" << all(result.errors);
    EXPECT_NE(result.errors[0].find("which is always denied"), std::string::npos)
        << result.errors[0];
    EXPECT_NE(result.errors[0].find("\"private\""), std::string::npos) << result.errors[0];
    EXPECT_TRUE(result.policy.prefixes.empty());
  }
  expect_error(with("allow", R"({"cidr":"10.1.0.0/16","services":["tcp/1"]})"),
               "web.json:2:9: '10.1.0.0/16' overlaps 10.0.0.0-10.255.255.255");
}

TEST(Parse, PrivateIsNarrow) {
  const auto entry = [](const std::string& address, const std::string& service) {
    return with("private", R"({"address":")" + address + R"(","service":")" + service + "\"}");
  };
  for (const char* address : {"10.0.0.5", "192.168.0.1", "100.64.0.1", "172.16.9.9", "fd00::5"}) {
    const ParseResult result = read(entry(address, "tcp/5432"));
    EXPECT_TRUE(result.errors.empty()) << all(result.errors);
    EXPECT_EQ(result.policy.private_rules.size(), 1U);
  }
  for (const char* address :
       {"127.0.0.1", "127.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "255.255.255.255",
        "0.0.0.0", "100.100.100.200", "192.0.0.192", "::1", "::", "fe80::1", "fd00:ec2::254",
        "fd20:ce::254", "ff02::1", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"}) {
    expect_error(entry(address, "tcp/80"), std::string("web.json:2:12: '") + address);
  }
  expect_error(entry("10.0.0.0/8", "tcp/80"), "web.json:2:12: ");
  expect_error(entry("db.example.com", "tcp/80"), "web.json:2:12: ");
  expect_error(
      entry("::ffff:10.0.0.5", "tcp/80"),
      "web.json:2:12: '::ffff:10.0.0.5' is an IPv4 address in IPv6 clothes; write 10.0.0.5");
  expect_error(entry("10.0.0.5", "tcp/80-81"), "web.json:2:33: 'tcp/80-81' is a range");
  expect_error(entry("10.0.0.5", "80"), "web.json:2:33: ");
  expect_error(with("private", R"({"address":"10.0.0.5"})"),
               "web.json:2:1: an entry of \"private\" needs");
}

TEST(Parse, ResolversMayBePrivateButNotLocal) {
  for (const char* address : {"1.1.1.1", "10.0.0.53", "fd00::53", "168.63.129.16"}) {
    EXPECT_TRUE(read(with("resolvers", "\"" + std::string(address) + "\"")).errors.empty())
        << address;
  }
  for (const char* address :
       {"127.0.0.53", "127.0.0.11", "169.254.169.253", "::1", "fe80::1", "fd00:ec2::254", "0.0.0.0",
        "224.0.0.1", "dns.example.com", "1.1.1.1:53", "::ffff:1.1.1.1"}) {
    expect_error(with("resolvers", "\"" + std::string(address) + "\""), "web.json:2:1: ");
  }
  expect_error(
      with("resolvers",
           R"("1.0.0.1","1.0.0.2","1.0.0.3","1.0.0.4","1.0.0.5","1.0.0.6","1.0.0.7","1.0.0.8",
"1.0.0.9")"),
      "web.json:3:1: more than 8 resolvers");
}

TEST(Parse, WarnsOfWhatIsRarelyMeant) {
  const ParseResult result = read(R"({"version":1,
"allow":[{"name":"a.example","services":["tcp/443"]}],
"deny":[{"cidr":"1.1.1.0/24"}],
"resolvers":["1.1.1.1","9.9.9.9","9.9.9.9","8.8.8.8"]})");
  ASSERT_TRUE(result.errors.empty()) << all(result.errors);
  EXPECT_EQ(all(result.warnings),
            "web.json:4:14: 1.1.1.1 is denied by 1.1.1.0/24 in line 3\n"
            "web.json:4:34: 9.9.9.9 stands twice\n"
            "web.json:4:44: 8.8.8.8 is reachable, but a resolver file holds only the first 3\n");
  const ParseResult none = read(with("allow", R"({"name":"a.example","services":["tcp/443"]})"));
  ASSERT_EQ(none.warnings.size(), 1U);
  EXPECT_NE(none.warnings[0].find("no \"resolvers\""), std::string::npos);
}

std::string many(int count, const std::string& before, const std::string& after) {
  std::string out = "{\"version\":1,\"allow\":[";
  for (int i = 0; i < count; ++i) {
    out += (i > 0 ? "," : "") + before + std::to_string(i / 250) + "." + std::to_string(i % 250) +
           after;
  }
  return out + "]}";
}

TEST(Parse, HoldsItsLimits) {
  const std::string tail = R"(.0/24","services":["tcp/22","tcp/80","tcp/443"]})";
  EXPECT_TRUE(read(many(4000, R"({"cidr":"11.)", tail)).errors.empty());
  expect_error(many(4001, R"({"cidr":"11.)", tail),
               "web.json:1:1: 4001 prefixes; a policy takes 4000");
  const std::string name_tail = R"(.example.com","services":["tcp/443"]})";
  EXPECT_TRUE(read(many(256, R"({"name":")", name_tail)).errors.empty());
  expect_error(many(257, R"({"name":")", name_tail), "web.json:1:1: 257 names; a policy takes 256");
  const std::string services =
      R"(.0/24","services":["tcp/1","tcp/3","tcp/5","tcp/7","tcp/9","tcp/11","tcp/13","tcp/15","tcp/17"]})";
  expect_error(many(3900, R"({"cidr":"11.)", services),
               "web.json:1:1: 35100 services in all entries");
}

TEST(Parse, ShowsFiftyErrors) {
  std::string text = "{\"version\":1,\"resolvers\":[";
  for (int i = 0; i < 100; ++i) text += (i > 0 ? "," : "") + std::string("7");
  const ParseResult result = read(text + "]}");
  ASSERT_EQ(result.errors.size(), 51U);
  EXPECT_EQ(result.errors.back(), "web.json: more errors are not shown");
}

TEST(Parse, CostsNoMoreThanItsSize) {
  std::string keys = "{";
  for (int i = 0; i < 100'000; ++i) keys += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":1";
  expect_error(keys + "}", "web.json:1:");
  expect_error("{\"version\":1,\"allow\":[" + std::string(2'000'000, ' ') + "]}x", "web.json:1:");
  std::string values = "[1";
  for (int i = 0; i < 1'000'000; ++i) values += ",1";
  expect_error(values + "]", "web.json:1:");
  const ParseResult result = read(keys + "}");
  EXPECT_NE(all(result.errors).find("more than 64 keys"), std::string::npos);
}

TEST(Parse, ErrorsAreFitForATerminal) {
  for (const char* text :
       {R"({"\u001b[2J":1})",
        R"({"version":1,"allow":[{"name":"\u001b[2J.com","services":["\u001b[2J"]},
        {"cidr":"\u001b[2J","services":["tcp/1"]}],"resolvers":["\u001b[2J"],"runtimes":["\u001b[2J"]})"}) {
    const std::string errors = all(read(text).errors);
    EXPECT_FALSE(errors.empty());
    EXPECT_EQ(errors.find('\x1b'), std::string::npos) << errors;
  }
}

TEST(Builtin, IsTheArticles) {
  const Policy& policy = builtin();
  EXPECT_EQ(policy.name, "default");
  ASSERT_EQ(policy.names.size(), 2U);
  EXPECT_EQ(policy.names[0].name, "api.anthropic.com");
  EXPECT_EQ(policy.names[1].name, "platform.claude.com");
  for (const auto& rule : policy.names) {
    ASSERT_EQ(rule.services.size(), 1U);
    EXPECT_EQ(rule.services[0].to_string(), "tcp/443");
  }
  ASSERT_EQ(policy.resolvers.size(), 2U);
  EXPECT_EQ(policy.resolvers[0].to_string(), "1.1.1.1");
  EXPECT_EQ(policy.resolvers[1].to_string(), "9.9.9.9");
  EXPECT_EQ(policy.runtimes, std::vector<std::string>{"runsc"});
}

TEST(ToJson, IsAPolicyFileThatMeansTheSame) {
  const ParseResult first = read(R"({"version":1,"description":"d",
"allow":[{"name":"b.example","services":["tcp/443"],"comment":"x"},{"name":"a.example","services":["tcp/80-90"]},
{"name":"b.example","services":["tcp/444","udp/443"],"optional":true},
{"cidr":"192.0.2.0/24","services":["tcp/1"]},{"cidr":"192.0.2.0/24","services":["tcp/2"]}],
"deny":[{"cidr":"192.0.2.0/28"},{"cidr":"192.0.2.0/28","services":["tcp/1"]},{"cidr":"192.0.2.128/25","services":["tcp/1"]}],
"private":[{"address":"10.0.0.5","service":"tcp/5432"},{"address":"10.0.0.5","service":"tcp/5432"}],
"resolvers":["9.9.9.9"],"runtimes":["runc"],"reject":false,"refresh_seconds":7,"grace_seconds":8,
"accept_host_resolver":true})");
  ASSERT_TRUE(first.errors.empty()) << all(first.errors);
  const std::string text = to_json(first.policy);
  EXPECT_NE(text.find("\"tcp/443-444\""), std::string::npos) << text;
  const ParseResult second = read(text);
  ASSERT_TRUE(second.errors.empty()) << all(second.errors) << text;
  EXPECT_EQ(to_json(second.policy), text);
  EXPECT_EQ(compile(second.policy, {}, {}).spec, compile(first.policy, {}, {}).spec);
  EXPECT_EQ(second.policy.names.size(), 2U);
  EXPECT_FALSE(second.policy.names[1].optional);
  EXPECT_EQ(second.policy.private_rules.size(), 1U);
  EXPECT_EQ(second.policy.grace, std::chrono::seconds(8));
  EXPECT_TRUE(second.policy.accept_host_resolver);
  EXPECT_TRUE(read(to_json(builtin())).errors.empty());
}

TEST(Tree, KnowsPlaces) {
  const TreeResult result =
      read_tree("{ \"a\" : [ 1,\n  -2.5 ,true,\tnull , \"x\\n\"],\n\"b\":{\"c\":12}}\n");
  ASSERT_TRUE(result.complete);
  const Node* a = result.root.find("a");
  ASSERT_NE(a, nullptr);
  ASSERT_EQ(a->items.size(), 5U);
  const auto place = [](const Node& node) {
    return std::to_string(node.at.line) + ":" + std::to_string(node.at.column);
  };
  EXPECT_EQ(place(*a), "1:9");
  EXPECT_EQ(place(a->items[0]), "1:11");
  EXPECT_EQ(place(a->items[1]), "2:3");
  EXPECT_EQ(place(a->items[2]), "2:9");
  EXPECT_EQ(place(a->items[3]), "2:15");
  EXPECT_EQ(place(a->items[4]), "2:22");
  const Node* b = result.root.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(place(*b), "3:5");
  EXPECT_EQ(place(*b->find("c")), "3:10");
}

}  // namespace
}  // namespace agentgate::policy

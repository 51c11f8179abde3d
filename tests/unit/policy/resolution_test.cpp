// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using std::chrono::seconds;
using Time = std::chrono::system_clock::time_point;

const Time kNow{seconds(1'800'000'000)};

Policy policy_with(const std::string& names) {
  ParseResult result = parse(
      "{\"version\":1,\"refresh_seconds\":300,\"grace_seconds\":3600,\"allow\":[" + names + "]}",
      "web", "web.json");
  EXPECT_TRUE(result.errors.empty());
  return std::move(result.policy);
}
const char* const kA = R"({"name":"a.example","services":["tcp/443"]})";

ResolvedName name(const std::vector<std::pair<const char*, Time>>& addresses, Time at,
                  const std::string& error = "") {
  ResolvedName out;
  for (const auto& [address, seen] : addresses)
    out.addresses.push_back({IpAddress::parse(address).value(), seen});
  out.resolved_at = at;
  out.ttl = seconds(60);
  out.error = error;
  return out;
}
std::string text(const Resolution& resolution, const std::string& key = "a.example") {
  std::string out;
  const auto at = resolution.names.find(key);
  if (at == resolution.names.end()) return "missing";
  for (const auto& address : at->second.addresses) out += address.address.to_string() + " ";
  return out;
}

TEST(Merge, KeepsWhatRotatedOutForTheGraceTime) {
  const Policy policy = policy_with(kA);
  const Resolution known{{{"a.example", name({{"192.0.2.1", kNow - seconds(3600)},
                                              {"192.0.2.2", kNow - seconds(3601)},
                                              {"192.0.2.3", kNow - seconds(9999)}},
                                             kNow - seconds(301))}}};
  const Resolution fresh{{{"a.example", name({{"192.0.2.0", kNow}, {"192.0.2.3", kNow}}, kNow)}}};
  const Resolution merged = merge(policy, known, fresh, kNow);
  EXPECT_EQ(text(merged), "192.0.2.0 192.0.2.1 192.0.2.3 ");
  const auto& addresses = merged.names.at("a.example").addresses;
  EXPECT_EQ(addresses[1].last_seen, kNow - seconds(3600));  // its grace goes on, not anew
  EXPECT_EQ(addresses[2].last_seen, kNow);
  EXPECT_EQ(merge(policy, merged, fresh, kNow), merged);
  EXPECT_EQ(text(merge(policy, merged, fresh, kNow + seconds(1))), "192.0.2.0 192.0.2.3 ");
}

TEST(Merge, KeepsLastGoodAddressesOfANameThatFails) {
  const Policy policy = policy_with(kA);
  const Resolution known{
      {{"a.example", name({{"192.0.2.1", kNow - seconds(99999)}}, kNow - seconds(99999))}}};
  const Resolution fresh{{{"a.example", name({}, kNow, "no answer in time")}}};
  const Resolution merged = merge(policy, known, fresh, kNow);
  EXPECT_EQ(text(merged), "192.0.2.1 ");
  EXPECT_EQ(merged.names.at("a.example").error, "no answer in time");
  EXPECT_EQ(merged.names.at("a.example").resolved_at, kNow);
  EXPECT_EQ(merged.names.at("a.example").ttl, seconds(60));
  EXPECT_EQ(merged.names.at("a.example").addresses[0].last_seen, kNow - seconds(99999));
  // And when it answers again, the error is gone.
  const Resolution again{{{"a.example", name({{"192.0.2.9", kNow}}, kNow)}}};
  EXPECT_EQ(merge(policy, merged, again, kNow).names.at("a.example").error, "");
  EXPECT_EQ(text(merge(policy, merged, again, kNow)), "192.0.2.9 ");
}

TEST(Merge, DropsNamesThatLeftAndKeepsNamesThatWereNotAsked) {
  const Policy policy = policy_with(kA);
  const Resolution known{{{"a.example", name({{"192.0.2.1", kNow}}, kNow)},
                          {"gone.example", name({{"192.0.2.2", kNow}}, kNow)}}};
  const Resolution merged = merge(policy, known, {}, kNow);
  EXPECT_EQ(text(merged), "192.0.2.1 ");
  EXPECT_EQ(text(merged, "gone.example"), "missing");
  EXPECT_EQ(text(merge(policy, {}, known, kNow), "gone.example"), "missing");
}

TEST(Merge, AClockThatGoesBackNeitherDropsNorKeepsForEver) {
  const Policy policy = policy_with(kA);
  const Resolution known{{{"a.example", name({{"192.0.2.1", kNow + seconds(86400)}}, kNow)}}};
  const Resolution fresh{{{"a.example", name({{"192.0.2.2", kNow}}, kNow)}}};
  const Resolution merged = merge(policy, known, fresh, kNow);
  EXPECT_EQ(text(merged), "192.0.2.1 192.0.2.2 ");
  EXPECT_EQ(text(merge(policy, merged, fresh, kNow + seconds(3601))), "192.0.2.2 ");
}

TEST(Merge, IsBounded) {
  const Policy policy = policy_with(kA);
  Resolution known;
  for (unsigned i = 0; i < 3000; ++i) {
    known.names["a.example"].addresses.push_back(
        {Ipv4Address({11, 0, static_cast<std::uint8_t>(i / 256), static_cast<std::uint8_t>(i)}),
         kNow - seconds(i)});
  }
  const Resolution fresh{{{"a.example", name({{"192.0.2.2", kNow}}, kNow)}}};
  const Resolution merged = merge(policy, known, fresh, kNow);
  const auto& addresses = merged.names.at("a.example").addresses;
  ASSERT_EQ(addresses.size(), 1024U);
  EXPECT_EQ(addresses.back().address.to_string(), "192.0.2.2");
  EXPECT_EQ(addresses.front().address.to_string(), "11.0.0.0");
  EXPECT_GE(addresses[1022].last_seen, kNow - seconds(1023));
}

TEST(NeedsRefresh, WhenMissingOldOrFailed) {
  const Policy policy = policy_with(kA);
  EXPECT_FALSE(needs_refresh(policy_with(""), {}, kNow));
  EXPECT_TRUE(needs_refresh(policy, {}, kNow));
  const auto at = [&](seconds age, const std::string& error, bool with_address) {
    Resolution resolution;
    resolution.names["a.example"] = name({}, kNow - age, error);
    if (with_address)
      resolution.names["a.example"] = name({{"192.0.2.1", kNow - age}}, kNow - age, error);
    return resolution;
  };
  EXPECT_FALSE(needs_refresh(policy, at(seconds(0), "", true), kNow));
  EXPECT_FALSE(needs_refresh(policy, at(seconds(300), "", true), kNow));
  EXPECT_TRUE(needs_refresh(policy, at(seconds(301), "", true), kNow));
  EXPECT_TRUE(needs_refresh(policy, at(seconds(-1), "", true), kNow));
  // Without an address the arm would fail: ask at once. With one it can wait a little.
  EXPECT_TRUE(needs_refresh(policy, at(seconds(0), "no", false), kNow));
  EXPECT_FALSE(needs_refresh(policy, at(seconds(10), "no", true), kNow));
  EXPECT_TRUE(needs_refresh(policy, at(seconds(11), "no", true), kNow));
  const Policy optional =
      policy_with(R"({"name":"a.example","services":["tcp/443"],"optional":true})");
  EXPECT_FALSE(needs_refresh(optional, at(seconds(0), "no", false), kNow));
  EXPECT_TRUE(needs_refresh(optional, at(seconds(11), "no", false), kNow));
}

TEST(ResolutionJson, ReadsBackEqual) {
  Resolution resolution;
  resolution.names["a.example"] =
      name({{"192.0.2.1", kNow}, {"2001:db8::1", kNow - seconds(5)}}, kNow);
  resolution.names["b.example"] = name({}, kNow, "the name does not exist (NXDOMAIN)");
  const auto back = resolution_from_json(to_json(resolution));
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(*back, resolution);
  EXPECT_EQ(resolution_from_json(to_json(Resolution{})).value(), Resolution{});
  resolution.names["a.example"].error = "\xff";
  EXPECT_TRUE(resolution_from_json(to_json(resolution)));  // and does not throw
}

TEST(ResolutionJson, RefusesWhatItDoesNotKnow) {
  const auto one = [](const std::string& body) {
    return R"({"version":1,"names":{"a.example":)" + body + "}}";
  };
  const std::string good = R"({"addresses":[],"resolved_at":1,"ttl":0,"error":""})";
  ASSERT_TRUE(resolution_from_json(one(good)));
  for (
      const std::string& text : std::vector<std::string>{
          "",
          "[]",
          "{}",
          "null",
          R"({"version":2,"names":{}})",
          R"({"version":1})",
          R"({"version":1,"names":[]})",
          R"({"version":1,"names":{},"more":1})",
          one("{}"),
          one("[]"),
          one(R"({"addresses":[],"resolved_at":1,"ttl":0})"),
          one(R"({"addresses":[],"resolved_at":1,"ttl":0,"error":"","more":1})"),
          one(R"({"addresses":{},"resolved_at":1,"ttl":0,"error":""})"),
          one(R"({"addresses":[],"resolved_at":1.5,"ttl":0,"error":""})"),
          one(R"({"addresses":[],"resolved_at":-1,"ttl":0,"error":""})"),
          one(R"({"addresses":[],"resolved_at":9223372036854775807,"ttl":0,"error":""})"),
          one(R"({"addresses":[],"resolved_at":18446744073709551615,"ttl":0,"error":""})"),
          one(R"({"addresses":[],"resolved_at":1,"ttl":-1,"error":""})"),
          one(R"({"addresses":[],"resolved_at":1,"ttl":0,"error":null})"),
          one(R"({"addresses":["192.0.2.1"],"resolved_at":1,"ttl":0,"error":""})"),
          one(R"({"addresses":[{"address":"192.0.2.01","last_seen":1}],"resolved_at":1,"ttl":0,"error":""})"),
          one(R"({"addresses":[{"address":"192.0.2.1"}],"resolved_at":1,"ttl":0,"error":""})"),
          one(R"({"addresses":[{"address":"192.0.2.1","last_seen":"1"}],"resolved_at":1,"ttl":0,"error":""})")}) {
    EXPECT_FALSE(resolution_from_json(text)) << text;
  }
}

}  // namespace
}  // namespace agentgate::policy

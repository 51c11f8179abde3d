// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/driver/driver.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/unit/driver/fake_endpoints.h"

namespace agentgate::driver {
namespace {

using nlohmann::json;

const std::string kNetwork(64, 'a');
const std::string kEndpoint(64, 'b');

class DriverTest : public testing::Test {
 protected:
  http::Response call(const std::string& verb, const std::string& body,
                      const std::string& method = "POST") {
    return driver_.handle({method, "/" + verb, body, {}});
  }
  json expect_done(const std::string& verb, const json& body) {
    const http::Response answer = call("NetworkDriver." + verb, body.dump() + "\n");
    EXPECT_EQ(answer.status, 200) << verb << answer.body;
    const json parsed = json::parse(answer.body);
    EXPECT_FALSE(parsed.contains("Err")) << answer.body;
    return parsed;
  }
  std::string expect_refused(const std::string& verb, const std::string& body, int status) {
    const http::Response answer = call("NetworkDriver." + verb, body);
    EXPECT_EQ(answer.status, status) << verb << answer.body;
    const json parsed = json::parse(answer.body);
    const std::string text = parsed.value("Err", "");
    EXPECT_FALSE(text.empty()) << answer.body;
    return text;
  }
  static json ids() { return {{"NetworkID", kNetwork}, {"EndpointID", kEndpoint}}; }
  static json network() {
    return {{"NetworkID", kNetwork},
            {"Options", {{"com.docker.network.generic", json::object()}}},
            {"IPv4Data", {{{"Pool", "10.99.0.0/24"}, {"Gateway", "10.99.0.1/24"}}}},
            {"IPv6Data", json::array()}};
  }
  static json endpoint(const char* address = "10.99.0.20/24") {
    json out = ids();
    out["Interface"] = {{"Address", address}, {"AddressIPv6", ""}, {"MacAddress", ""}};
    out["Options"] = json::object();
    return out;
  }
  static json join() {
    json out = ids();
    out["SandboxKey"] = "/var/run/docker/netns/0123456789ab";
    return out;
  }

  FakeEndpoints endpoints_;
  Driver driver_{endpoints_, [this](const NetworkId& id) {
                   const auto found = endpoints_.networks.find(id);
                   return found == endpoints_.networks.end() ? std::nullopt
                                                             : std::optional(found->second);
                 }};
};

TEST_F(DriverTest, TheLifeOfAnEndpoint) {
  expect_done("CreateNetwork", network());
  const json made = expect_done("CreateEndpoint", endpoint());
  EXPECT_EQ(made["Interface"]["MacAddress"], mac_of(kEndpoint).to_string());
  const json joined = expect_done("Join", join());
  EXPECT_EQ(joined["InterfaceName"]["SrcName"], "agcbbbbbbbbbb");
  EXPECT_EQ(endpoints_.endpoints.begin()->second.sandbox_key, "/var/run/docker/netns/0123456789ab");
  expect_done("ProgramExternalConnectivity", ids());
  EXPECT_TRUE(expect_done("EndpointOperInfo", ids())["Value"].is_object());
  expect_done("RevokeExternalConnectivity", ids());
  expect_done("Leave", ids());
  expect_done("DeleteEndpoint", ids());
  EXPECT_TRUE(endpoints_.endpoints.empty());
  expect_done("DeleteNetwork", {{"NetworkID", kNetwork}});
  EXPECT_TRUE(endpoints_.networks.empty());
}

TEST_F(DriverTest, EverythingCanBeRepeatedAndUnknown) {
  for (int i = 0; i < 2; ++i) {
    expect_done("Leave", ids());
    expect_done("DeleteEndpoint", ids());
    expect_done("DeleteNetwork", {{"NetworkID", kNetwork}});
    expect_done("EndpointOperInfo", ids());
    expect_done("RevokeExternalConnectivity", ids());
    expect_done("ProgramExternalConnectivity", ids());
  }
  for (int i = 0; i < 2; ++i) expect_done("CreateNetwork", network());
  for (int i = 0; i < 2; ++i) expect_done("CreateEndpoint", endpoint());
  for (int i = 0; i < 2; ++i) expect_done("Join", join());
}

TEST_F(DriverTest, HandshakeTellsTheHostAndNeedsNoBody) {
  EXPECT_EQ(call("Plugin.Activate", "").body, R"({"Implements":["NetworkDriver"]})");
  EXPECT_EQ(call("NetworkDriver.GetCapabilities", "").body,
            R"({"Scope":"local","ConnectivityScope":"local"})");
  EXPECT_EQ(endpoints_.count("engine_seen"), 2U);
  EXPECT_EQ(call("NetworkDriver.DiscoverNew", "").status, 200);
  EXPECT_EQ(call("NetworkDriver.DiscoverDelete", R"({"DiscoveryType":1})").status, 200);
  EXPECT_EQ(json::parse(call("NetworkDriver.GwAllocCheck", "{}").body),
            json({{"SkipIPv4", false}, {"SkipIPv6", false}}));
}

TEST_F(DriverTest, ARetryWithoutBodyIsRefusedAndSuspected) {
  for (const char* verb :
       {"CreateNetwork", "DeleteNetwork", "CreateEndpoint", "Join", "Leave", "DeleteEndpoint",
        "EndpointOperInfo", "ProgramExternalConnectivity", "RevokeExternalConnectivity"}) {
    for (const char* body : {"", "\n", " \r\n\t"}) {
      endpoints_.calls.clear();
      EXPECT_NE(expect_refused(verb, body, 400).find("body"), std::string::npos);
      EXPECT_EQ(endpoints_.calls, std::vector<std::string>{"suspect_orphans"}) << verb;
    }
  }
}

TEST_F(DriverTest, UnknownVerbsAndMethods) {
  for (const char* verb : {"NetworkDriver.Fly", "NetworkDriver", "", "PluginXActivate",
                           "Plugin.Activate/", "VolumeDriver.Create"}) {
    const http::Response answer = call(verb, "{}");
    EXPECT_EQ(answer.status, 404) << verb;
    EXPECT_TRUE(json::parse(answer.body).contains("Err"));
  }
  EXPECT_EQ(call("Plugin.Activate", "", "GET").status, 405);
  EXPECT_TRUE(endpoints_.calls.empty());
}

TEST_F(DriverTest, GlobalScopeIsRefused) {
  EXPECT_NE(expect_refused("AllocateNetwork", "{}", 400).find("local"), std::string::npos);
  EXPECT_NE(expect_refused("FreeNetwork", "{}", 400).find("local"), std::string::npos);
}

TEST_F(DriverTest, AddressesThatDoNotFitNeverReachTheHost) {
  expect_done("CreateNetwork", network());
  for (const char* address : {"10.99.0.1/24", "10.99.0.255/24", "10.98.0.2/24"}) {
    const std::string text = expect_refused("CreateEndpoint", endpoint(address).dump(), 400);
    EXPECT_NE(text.find("Interface.Address"), std::string::npos) << text;
  }
  EXPECT_EQ(endpoints_.count("create_endpoint"), 0U);
}

TEST_F(DriverTest, TheHostsErrorsBecomeDockersErrors) {
  expect_done("CreateNetwork", network());
  endpoints_.next_error = Error{"create endpoint x", EADDRINUSE, {}, "its address is in use"};
  EXPECT_EQ(expect_refused("CreateEndpoint", endpoint().dump(), 409),
            "agentgate: create endpoint x: its address is in use");
  endpoints_.next_error = Error{"create endpoint x", ETIMEDOUT, {}, "no answer in time"};
  const std::string text = expect_refused("CreateEndpoint", endpoint().dump(), 500);
  EXPECT_NE(text.find("ETIMEDOUT"), std::string::npos) << text;
  // Docker reads 404 as "not implemented": an unknown id must not look like that.
  EXPECT_NE(expect_refused("Join", join().dump(), 400).find("not known"), std::string::npos);
}

TEST_F(DriverTest, JoinOnAnotherNetworkIsRefused) {
  expect_done("CreateNetwork", network());
  expect_done("CreateEndpoint", endpoint());
  json other = join();
  other["NetworkID"] = std::string(64, 'c');
  EXPECT_NE(expect_refused("Join", other.dump(), 400).find("another network"), std::string::npos);
}

TEST_F(DriverTest, BadRequestsNameTheFieldAndChangeNothing) {
  json bad = network();
  bad["Options"]["com.docker.network.generic"]["agentgate.mtu"] = "many";
  const std::string text = expect_refused("CreateNetwork", bad.dump(), 400);
  EXPECT_NE(text.find("agentgate.mtu"), std::string::npos) << text;
  expect_refused("CreateNetwork", "not json", 400);
  expect_refused("Leave", R"({"NetworkID":"x"})", 400);
  EXPECT_TRUE(endpoints_.calls.empty());
}

TEST_F(DriverTest, EveryPathIsKnownOnce) {
  const auto paths = Driver::paths();
  EXPECT_EQ(paths.size(), 16U);
  EXPECT_EQ(std::adjacent_find(paths.begin(), paths.end()), paths.end());
}

}  // namespace
}  // namespace agentgate::driver

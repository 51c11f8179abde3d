// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/driver/codec.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace agentgate::driver {
namespace {

using nlohmann::json;

const std::string kNetwork(64, 'a');
const std::string kEndpoint = "1234567890" + std::string(54, 'b');

json network_request() {
  return json::parse(R"({"Options":{"com.docker.network.enable_ipv6":true,
      "com.docker.network.generic":{"agentgate.policy":"web"}},
    "IPv4Data":[{"AddressSpace":"LocalDefault","AuxAddresses":{"x":"10.99.0.9/24"},
                 "Gateway":"10.99.0.1/24","Pool":"10.99.0.0/24"}],
    "IPv6Data":[{"AddressSpace":"LocalDefault","Gateway":"fd99::1/64","Pool":"fd99::/64"}],
    "NetworkID":")" + kNetwork +
                     "\"}");
}

json endpoint_request() {
  return json::parse(R"({"Interface":{"Address":"10.99.0.20/24","AddressIPv6":"fd99::2/64",
      "MacAddress":""},
    "Options":{"com.docker.network.endpoint.exposedports":[{"Proto":17,"Port":90}],
               "com.docker.network.portmap":[]},
    "NetworkID":")" + kNetwork +
                     R"(","EndpointID":")" + kEndpoint + "\"}");
}

std::string error_of_network(const json& request) {
  const auto out = decode_create_network(request.dump());
  return out ? "accepted" : out.error().operation + ": " + out.error().text;
}

std::string error_of_endpoint(const json& request) {
  const auto out = decode_create_endpoint(request.dump());
  return out ? "accepted" : out.error().operation + ": " + out.error().text;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_PRED2(has, text, part)

TEST(CreateNetwork, ReadsWhatDockerSends) {
  const auto out = decode_create_network(network_request().dump() + "\n");
  ASSERT_TRUE(out) << out.error().to_string();
  NetworkRecord want;
  want.id = NetworkId::parse(kNetwork).value();
  want.gateway4 = Ipv4InterfaceAddress::parse("10.99.0.1/24").value();
  want.gateway6 = Ipv6InterfaceAddress::parse("fd99::1/64").value();
  want.policy = "web";
  EXPECT_EQ(*out, want);
}

TEST(CreateNetwork, HasDefaults) {
  json request = network_request();
  request["Options"] = nullptr;
  request["IPv6Data"] = json::array();
  const auto out = decode_create_network(request.dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_EQ(out->policy, "default");
  EXPECT_EQ(out->mtu, 1500U);
  EXPECT_TRUE(out->masquerade);
  EXPECT_FALSE(out->gateway6);
}

TEST(CreateNetwork, ReadsEveryOption) {
  json request = network_request();
  request["Options"]["com.docker.network.generic"] = {
      {"agentgate.policy", "a_b-c"}, {"agentgate.mtu", "9000"}, {"agentgate.masquerade", "false"}};
  const auto out = decode_create_network(request.dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_EQ(out->policy, "a_b-c");
  EXPECT_EQ(out->mtu, 9000U);
  EXPECT_FALSE(out->masquerade);
}

TEST(CreateNetwork, TakesIpv6Alone) {
  json request = network_request();
  request["Options"]["com.docker.network.enable_ipv4"] = false;
  for (const json& none : {json(nullptr), json::array()}) {
    request["IPv4Data"] = none;
    const auto out = decode_create_network(request.dump());
    ASSERT_TRUE(out) << out.error().to_string();
    EXPECT_FALSE(out->gateway4);
    EXPECT_TRUE(out->gateway6);
  }
}

TEST(CreateNetwork, TakesLargePoolsAndSwarmIds) {
  json request = network_request();
  request["NetworkID"] = "x7kq0m3zj2v9c8b1n4l5a6s7d";
  request["IPv4Data"][0]["Pool"] = "10.0.0.0/8";
  request["IPv4Data"][0]["Gateway"] = "10.1.2.3/8";
  EXPECT_EQ(error_of_network(request), "accepted");
}

TEST(CreateNetwork, RefusesUnknownOptionsAndListsTheKnown) {
  json request = network_request();
  request["Options"]["com.docker.network.generic"] = {{"agentgate.polici", "web"}};
  const std::string error = error_of_network(request);
  EXPECT_HAS(error, "agentgate.polici");
  EXPECT_HAS(error, "agentgate.policy, agentgate.mtu and agentgate.masquerade");
  request["Options"]["com.docker.network.generic"] = {{"com.docker.network.bridge.name", "br0"}};
  EXPECT_HAS(error_of_network(request), "has no effect here");
  request["Options"]["com.docker.network.generic"] = {{"com.docker.network.driver.mtu", "1400"}};
  EXPECT_HAS(error_of_network(request), "agentgate.mtu");
  request["Options"] = {{"something", true}};
  EXPECT_HAS(error_of_network(request), "something");
}

TEST(CreateNetwork, ToleratesWhatANewerEngineSays) {
  json request = network_request();
  request["Options"]["com.docker.network.something_new"] = {{"a", 1}};
  request["Options"]["com.docker.network.internal"] = false;
  request["Something"] = 1;
  EXPECT_EQ(error_of_network(request), "accepted");
}

TEST(CreateNetwork, RefusesInternal) {
  json request = network_request();
  for (const json& value : {json(true), json("true")}) {
    request["Options"]["com.docker.network.internal"] = value;
    EXPECT_HAS(error_of_network(request), "closed by default");
  }
  request["Options"]["com.docker.network.internal"] = 3;
  EXPECT_HAS(error_of_network(request), "true or false");
}

TEST(CreateNetwork, ChecksOptionValues) {
  const auto with = [](const char* key, const json& value) {
    json request = network_request();
    request["Options"]["com.docker.network.generic"] = {{key, value}};
    return error_of_network(request);
  };
  for (const char* mtu : {"", "575", "65536", "1500x", " 1500", "-1", "99999999999", "0x600"}) {
    EXPECT_HAS(with("agentgate.mtu", mtu), "576 to 65535") << mtu;
  }
  EXPECT_HAS(with("agentgate.mtu", "1279"), "1280");  // the network has IPv6
  EXPECT_EQ(with("agentgate.mtu", "1280"), "accepted");
  EXPECT_HAS(with("agentgate.mtu", 1500), "string");
  EXPECT_HAS(with("agentgate.masquerade", "yes"), "true or false");
  EXPECT_HAS(with("agentgate.masquerade", false), "string");
  EXPECT_HAS(with("agentgate.policy", "../etc"), "policy name");
  EXPECT_HAS(with("agentgate.policy", ""), "policy name");
}

TEST(CreateNetwork, ChecksSubnets) {
  const auto with = [](const char* pool, const char* gateway) {
    json request = network_request();
    request["IPv6Data"] = json::array();
    request["IPv4Data"][0]["Pool"] = pool;
    request["IPv4Data"][0]["Gateway"] = gateway;
    return error_of_network(request);
  };
  EXPECT_EQ(with("10.99.0.0/30", "10.99.0.1/30"), "accepted");
  EXPECT_HAS(with("0.0.0.0/0", ""), "--subnet");  // --ipam-driver null
  EXPECT_HAS(with("", ""), "--subnet");
  EXPECT_HAS(with("10.99.0.0/31", "10.99.0.1/31"), "no room");
  EXPECT_HAS(with("10.99.0.0/24", ""), "--gateway");
  EXPECT_HAS(with("10.99.0.0/24", "10.98.0.1/24"), "not in the subnet");
  EXPECT_HAS(with("10.99.0.0/24", "10.99.0.0/24"), "broadcast");
  EXPECT_HAS(with("10.99.0.0/24", "10.99.0.255/24"), "broadcast");
  EXPECT_HAS(with("10.99.0.1/24", "10.99.0.1/24"), "10.99.0.0/24");  // host bits
  EXPECT_HAS(with("fd99::/64", "fd99::1/64"), "IPv4Data[0].Pool");
  EXPECT_HAS(with("nonsense", "10.99.0.1/24"), "IPv4Data[0].Pool");
  json none = network_request();
  none.erase("IPv4Data");
  none.erase("IPv6Data");
  EXPECT_HAS(error_of_network(none), "no subnet");
  json two = network_request();
  two["IPv4Data"].push_back(two["IPv4Data"][0]);
  EXPECT_HAS(error_of_network(two), "more than one subnet");
}

TEST(CreateNetwork, ChecksTypesEverywhere) {
  for (const json& wrong : {json(1), json("x"), json(true), json::array({1})}) {
    for (const char* key : {"Options", "IPv4Data", "IPv6Data"}) {
      json request = network_request();
      request[key] = wrong;
      EXPECT_NE(error_of_network(request), "accepted") << key << wrong;
    }
    json request = network_request();
    request["Options"]["com.docker.network.generic"] = wrong;
    EXPECT_NE(error_of_network(request), "accepted") << wrong;
    request = network_request();
    request["IPv4Data"][0]["AuxAddresses"] = wrong;
    EXPECT_NE(error_of_network(request), "accepted") << wrong;
  }
  for (const json& wrong :
       {json(1), json(nullptr), json(""), json("../../x"), json("ABCDEF123456")}) {
    json request = network_request();
    request["NetworkID"] = wrong;
    EXPECT_HAS(error_of_network(request), "NetworkID") << wrong;
  }
  for (const char* body : {"", "{", "[]", "null", "1", "\"x\"", "{\"NetworkID\":\"\xff\"}"}) {
    EXPECT_FALSE(decode_create_network(body)) << body;
  }
}

TEST(CreateEndpoint, ReadsWhatDockerSends) {
  const auto out = decode_create_endpoint(endpoint_request().dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_EQ(out->endpoint.id.str(), kEndpoint);
  EXPECT_EQ(out->endpoint.network.str(), kNetwork);
  EXPECT_EQ(out->endpoint.address4, Ipv4Address::parse("10.99.0.20").value());
  EXPECT_EQ(out->endpoint.address6, Ipv6Address::parse("fd99::2").value());
  EXPECT_FALSE(out->mac_requested);
  EXPECT_EQ(out->endpoint.mac, mac_of(kEndpoint));
  EXPECT_TRUE(out->endpoint.policy.empty());
  EXPECT_FALSE(out->endpoint.prepared);
  EXPECT_FALSE(out->endpoint.release);
}

TEST(CreateEndpoint, TakesARequestedMac) {
  json request = endpoint_request();
  request["Interface"]["MacAddress"] = "02:42:0a:63:00:14";
  request["Options"]["com.docker.network.endpoint.macaddress"] = "AkIKYwAU";
  const auto out = decode_create_endpoint(request.dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_TRUE(out->mac_requested);
  EXPECT_EQ(out->endpoint.mac.to_string(), "02:42:0a:63:00:14");
  for (const char* mac : {"01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "x"}) {
    request["Interface"]["MacAddress"] = mac;
    EXPECT_HAS(error_of_endpoint(request), "Interface.MacAddress") << mac;
  }
}

TEST(CreateEndpoint, TakesOneFamily) {
  json request = endpoint_request();
  request["Interface"]["Address"] = "";
  EXPECT_EQ(error_of_endpoint(request), "accepted");
  request["Interface"]["AddressIPv6"] = "";
  EXPECT_HAS(error_of_endpoint(request), "no address");
  request["Interface"] = nullptr;
  EXPECT_HAS(error_of_endpoint(request), "no address");
}

TEST(CreateEndpoint, RefusesPublishedPorts) {
  json request = endpoint_request();
  request["Options"]["com.docker.network.portmap"] = json::parse(
      R"([{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":8080,"HostPortEnd":8080}])");
  EXPECT_HAS(error_of_endpoint(request), "--publish");
  // A driver-opt of the same name, which Docker does not overwrite on some networks.
  request["Options"]["com.docker.network.portmap"] = "80";
  EXPECT_HAS(error_of_endpoint(request), "--publish");
  request["Options"]["com.docker.network.portmap"] = nullptr;
  EXPECT_EQ(error_of_endpoint(request), "accepted");
}

TEST(CreateEndpoint, KnowsItsOptions) {
  json request = endpoint_request();
  request["Options"] = {{"agentgate.policy", "web"},
                        {"com.docker.network.endpoint.dnsservers", json::array({"192.0.2.1"})},
                        {"com.docker.network.endpoint.sysctls", "net.ipv4.conf.IFNAME.x=1"},
                        {"com.docker.network.endpoint.ifname", "eth7"},
                        {"com.docker.network.driver.private.no_proxy_6to4", true},
                        {"com.docker.network.something_new", json::object()}};
  const auto out = decode_create_endpoint(request.dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_EQ(out->endpoint.policy, "web");
  request["Options"] = {{"agentgate.policy", 1}};
  EXPECT_HAS(error_of_endpoint(request), "agentgate.policy");
  request["Options"] = {{"agentgate.policy", "No Name"}};
  EXPECT_HAS(error_of_endpoint(request), "policy name");
  for (const char* key : {"agentgate.open", "dk", "com.docker.network.bridge.inhibit_ipv4"}) {
    request["Options"] = json{{key, "v"}};
    EXPECT_HAS(error_of_endpoint(request), key);
  }
}

TEST(CreateEndpoint, ChecksTypesEverywhere) {
  for (const json& wrong : {json(1), json("x"), json(true), json::array({1})}) {
    for (const char* key : {"Interface", "Options"}) {
      json request = endpoint_request();
      request[key] = wrong;
      EXPECT_NE(error_of_endpoint(request), "accepted") << key << wrong;
    }
    for (const char* key : {"Address", "AddressIPv6", "MacAddress"}) {
      json request = endpoint_request();
      request["Interface"][key] = wrong;
      EXPECT_HAS(error_of_endpoint(request), std::string("Interface.") + key) << wrong;
    }
  }
  json request = endpoint_request();
  request.erase("EndpointID");
  EXPECT_HAS(error_of_endpoint(request), "EndpointID");
  request = endpoint_request();
  request["Interface"]["Address"] = "0.0.0.0/24";
  EXPECT_NE(error_of_endpoint(request), "accepted");
}

TEST(CheckAddresses, KeepsToTheSubnet) {
  const auto network = decode_create_network(network_request().dump()).value();
  const auto check = [&](const char* v4, const char* v6) {
    EndpointRecord endpoint;
    if (*v4 != 0) endpoint.address4 = Ipv4Address::parse(v4).value();
    if (*v6 != 0) endpoint.address6 = Ipv6Address::parse(v6).value();
    const Status status = check_addresses(endpoint, network);
    return status ? "accepted" : status.error().text;
  };
  EXPECT_EQ(check("10.99.0.2", "fd99::2"), "accepted");
  EXPECT_EQ(check("10.99.0.254", "fd99::ffff:ffff:ffff:ffff"), "accepted");
  EXPECT_HAS(check("10.99.1.2", ""), "not in the network's subnet");
  EXPECT_HAS(check("10.99.0.1", ""), "gateway");
  EXPECT_HAS(check("10.99.0.0", ""), "broadcast");
  EXPECT_HAS(check("10.99.0.255", ""), "broadcast");
  EXPECT_HAS(check("", "fd98::2"), "not in the network's subnet");
  EXPECT_HAS(check("", "fd99::1"), "gateway");
  EXPECT_HAS(check("", "fd99::"), "network's own");
  NetworkRecord only4 = network;
  only4.gateway6.reset();
  EndpointRecord both;
  both.address6 = Ipv6Address::parse("fd99::2").value();
  EXPECT_FALSE(check_addresses(both, only4));
}

TEST(Join, ReadsAndChecks) {
  json request{{"NetworkID", kNetwork},
               {"EndpointID", kEndpoint},
               {"SandboxKey", "/var/run/docker/netns/0123456789ab"},
               {"Options", {{"com.docker.network.portmap", json::array({1})}}}};
  const auto out = decode_join(request.dump());
  ASSERT_TRUE(out) << out.error().to_string();
  EXPECT_EQ(out->sandbox_key, "/var/run/docker/netns/0123456789ab");
  for (const json& wrong :
       {json(""), json(1), json(nullptr), json("relative"), json(std::string("/a\0b", 4))}) {
    request["SandboxKey"] = wrong;
    const auto refused = decode_join(request.dump());
    ASSERT_FALSE(refused) << wrong;
    EXPECT_EQ(refused.error().operation, "SandboxKey");
  }
}

host::Port port() {
  host::Port out;
  out.network = decode_create_network(network_request().dump()).value();
  out.endpoint = decode_create_endpoint(endpoint_request().dump()).value().endpoint;
  return out;
}

TEST(Join, AnswersHalfRoutesAndNoGateway) {
  const json answer = json::parse(encode_join(port()));
  const json want = json::parse(R"({"InterfaceName":{"SrcName":"agc1234567890","DstPrefix":"eth"},
      "Gateway":"","GatewayIPv6":"","DisableGatewayService":true,
      "StaticRoutes":[
        {"Destination":"0.0.0.0/1","RouteType":0,"NextHop":"10.99.0.1"},
        {"Destination":"128.0.0.0/1","RouteType":0,"NextHop":"10.99.0.1"},
        {"Destination":"::/1","RouteType":0,"NextHop":"fd99::1"},
        {"Destination":"8000::/1","RouteType":0,"NextHop":"fd99::1"}]})");
  EXPECT_EQ(answer, want);
}

TEST(Join, RoutesOnlyTheFamiliesThereAre) {
  host::Port only4 = port();
  only4.network.gateway6.reset();
  only4.endpoint.address6.reset();
  EXPECT_EQ(json::parse(encode_join(only4))["StaticRoutes"].size(), 2U);
  host::Port only6 = port();
  only6.network.gateway4.reset();
  only6.endpoint.address4.reset();
  const json routes = json::parse(encode_join(only6))["StaticRoutes"];
  ASSERT_EQ(routes.size(), 2U);
  EXPECT_EQ(routes[0]["Destination"], "::/1");
  host::Port none = only6;
  none.endpoint.address6.reset();
  EXPECT_TRUE(json::parse(encode_join(none))["StaticRoutes"].is_array());
}

TEST(Answers, GiveBackAMacOnlyIfNoneWasAsked) {
  auto made = decode_create_endpoint(endpoint_request().dump()).value();
  const json with = json::parse(encode_create_endpoint(made));
  EXPECT_EQ(with, json({{"Interface", {{"MacAddress", mac_of(kEndpoint).to_string()}}}}));
  made.mac_requested = true;
  EXPECT_EQ(json::parse(encode_create_endpoint(made)), json({{"Interface", json::object()}}));
}

TEST(Answers, AreWhatDockerReads) {
  EXPECT_EQ(encode_activate(), R"({"Implements":["NetworkDriver"]})");
  EXPECT_EQ(encode_capabilities(), R"({"Scope":"local","ConnectivityScope":"local"})");
  EXPECT_TRUE(
      json::parse(encode_endpoint_info(EndpointId::parse(kEndpoint).value()))["Value"].is_object());
  EXPECT_EQ(json::parse(encode_error("a\xff\"b"))["Err"].get<std::string>().substr(0, 1), "a");
}

}  // namespace
}  // namespace agentgate::driver

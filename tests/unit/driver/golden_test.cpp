// SPDX-License-Identifier: GPL-2.0-or-later
//
// Every request that a real engine was seen to send (tests/golden/ENGINE/*.json: method, path,
// headers, body) is answered, with what that verb promises.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "plugin/driver/driver.h"
#include "tests/unit/driver/fake_endpoints.h"

namespace agentgate::driver {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::vector<fs::path> golden_files() {
  std::vector<fs::path> out;
  if (!fs::exists(AGENTGATE_GOLDEN)) return out;
  for (const auto& entry : fs::recursive_directory_iterator(AGENTGATE_GOLDEN)) {
    if (entry.path().extension() == ".json") out.push_back(entry.path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

// The body as text, however the capture keeps it.
std::string body_of(const json& captured) {
  const json body = captured.value("body", json(""));
  return body.is_string() ? body.get<std::string>() : body.dump();
}

bool publishes(const json& body) {
  const json options = body.value("Options", json::object());
  if (!options.is_object() || !options.contains("com.docker.network.portmap")) return false;
  // A driver option of that name arrives as text where Docker does not overwrite it.
  const json& map = options["com.docker.network.portmap"];
  return !map.is_array() || !map.empty();
}

// Options that a person asked for and that agentgate refuses; captures have some on purpose.
bool refused_network(const json& body) {
  const json options = body.value("Options", json::object());
  if (!options.is_object()) return false;
  if (options.value("com.docker.network.internal", json(false)) == true) return true;
  const json generic = options.value("com.docker.network.generic", json::object());
  static const std::set<std::string> known{"agentgate.policy", "agentgate.mtu",
                                           "agentgate.masquerade"};
  for (const auto& [key, value] : generic.items()) {
    if (known.count(key) == 0) return true;
  }
  return false;
}

bool refused_endpoint(const json& body) {
  if (publishes(body)) return true;
  const json options = body.value("Options", json::object());
  for (const auto& [key, value] : options.items()) {
    if (key != "agentgate.policy" && key.rfind("com.docker.network.", 0) != 0) return true;
  }
  return false;
}

// What exists before the request, so that it can be done: the captured network and endpoint.
void prepare(FakeEndpoints& endpoints, const json& body, const std::string& verb) {
  if (verb == "CreateNetwork" || !body.contains("NetworkID")) return;
  NetworkRecord network;
  network.id = NetworkId::parse(body["NetworkID"].get<std::string>()).value();
  network.policy = "default";
  // A subnet that every captured address of its family is in.
  const json interface = body.value("Interface", json::object());
  const std::string v4 = interface.is_object() ? interface.value("Address", "") : "";
  const std::string v6 = interface.is_object() ? interface.value("AddressIPv6", "") : "";
  network.gateway4 = Ipv4InterfaceAddress::parse("10.99.0.1/24").value();
  if (!v4.empty()) {
    auto gateway = Ipv4InterfaceAddress::parse(v4).value();
    gateway.address = next(gateway.prefix().first()).value();
    network.gateway4 = gateway;
  }
  if (!v6.empty()) {
    auto gateway = Ipv6InterfaceAddress::parse(v6).value();
    gateway.address = next(gateway.prefix().first()).value();
    network.gateway6 = gateway;
  }
  endpoints.networks[network.id] = network;
  if (verb == "CreateEndpoint" || !body.contains("EndpointID")) return;
  EndpointRecord endpoint;
  endpoint.id = EndpointId::parse(body["EndpointID"].get<std::string>()).value();
  endpoint.network = network.id;
  endpoint.address4 = Ipv4Address::parse("10.99.0.2").value();
  endpoints.endpoints[endpoint.id] = endpoint;
}

void expect_by_verb(const std::string& verb, const json& body, const http::Response& answer,
                    const FakeEndpoints& endpoints) {
  const json got = json::parse(answer.body);
  if ((verb == "CreateNetwork" && refused_network(body)) ||
      (verb == "CreateEndpoint" && refused_endpoint(body))) {
    EXPECT_EQ(answer.status, 400) << answer.body;
    EXPECT_FALSE(got.value("Err", "").empty());
    EXPECT_EQ(endpoints.count("create_network") + endpoints.count("create_endpoint"), 0U);
    return;
  }
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_FALSE(got.contains("Err")) << answer.body;
  if (verb == "Activate") {
    EXPECT_EQ(got["Implements"], json::array({"NetworkDriver"}));
  } else if (verb == "GetCapabilities") {
    EXPECT_EQ(got["Scope"], "local");
    EXPECT_EQ(got["ConnectivityScope"], "local");
  } else if (verb == "CreateNetwork") {
    ASSERT_EQ(endpoints.networks.size(), 1U);
    const NetworkRecord& network = endpoints.networks.begin()->second;
    EXPECT_EQ(network.id.str(), body["NetworkID"].get<std::string>());
    const json v4 = body.value("IPv4Data", json::array());
    ASSERT_EQ(network.gateway4.has_value(), v4.is_array() && !v4.empty());
    if (network.gateway4) {
      EXPECT_EQ(network.gateway4->to_string(), v4[0]["Gateway"].get<std::string>());
      EXPECT_EQ(network.gateway4->prefix().to_string(), v4[0]["Pool"].get<std::string>());
    }
    const json v6 = body.value("IPv6Data", json::array());
    ASSERT_EQ(network.gateway6.has_value(), v6.is_array() && !v6.empty());
    if (network.gateway6) {
      EXPECT_EQ(network.gateway6->to_string(), v6[0]["Gateway"].get<std::string>());
    }
  } else if (verb == "CreateEndpoint") {
    ASSERT_EQ(endpoints.endpoints.size(), 1U);
    const EndpointRecord& endpoint = endpoints.endpoints.begin()->second;
    const json& interface = body["Interface"];
    EXPECT_EQ(endpoint.id.str(), body["EndpointID"].get<std::string>());
    if (endpoint.address4) {
      EXPECT_EQ(
          interface["Address"].get<std::string>().rfind(endpoint.address4->to_string() + "/", 0),
          0U);
    }
    const std::string asked = interface.value("MacAddress", "");
    EXPECT_EQ(got["Interface"].contains("MacAddress"), asked.empty());
    EXPECT_EQ(endpoint.mac.to_string(),
              asked.empty() ? got["Interface"]["MacAddress"].get<std::string>() : asked);
    EXPECT_FALSE(got["Interface"].contains("Address"));
    EXPECT_FALSE(got["Interface"].contains("AddressIPv6"));
  } else if (verb == "Join") {
    EXPECT_EQ(endpoints.endpoints.begin()->second.sandbox_key,
              body["SandboxKey"].get<std::string>());
    EXPECT_EQ(got["InterfaceName"]["DstPrefix"], "eth");
    EXPECT_LE(got["InterfaceName"]["SrcName"].get<std::string>().size(), 15U);
    EXPECT_EQ(got["Gateway"], "");
    EXPECT_EQ(got["DisableGatewayService"], true);
    ASSERT_TRUE(got["StaticRoutes"].is_array());
    EXPECT_EQ(got["StaticRoutes"].size(), 2U);
  } else if (verb == "Leave") {
    EXPECT_EQ(endpoints.count("leave"), 1U);
    EXPECT_EQ(endpoints.endpoints.size(), 1U);
  } else if (verb == "DeleteEndpoint") {
    EXPECT_TRUE(endpoints.endpoints.empty());
  } else if (verb == "DeleteNetwork") {
    EXPECT_TRUE(endpoints.networks.empty());
  } else if (verb == "EndpointOperInfo") {
    EXPECT_TRUE(got["Value"].is_object());
  }
}

TEST(Golden, EveryCapturedRequestIsAnswered) {
  const auto files = golden_files();
  std::map<std::string, std::set<std::string>> verbs;  // by engine
  for (const fs::path& file : files) {
    SCOPED_TRACE(file.string());
    std::ifstream stream(file);
    const json captured = json::parse(stream, nullptr, false);
    ASSERT_FALSE(captured.is_discarded());
    const std::string path = captured.value("path", "");
    const std::string verb = path.substr(path.find('.') + 1);
    const std::string text = body_of(captured);
    const json body = text.find_first_not_of(" \r\n") == std::string::npos
                          ? json::object()
                          : json::parse(text, nullptr, false);
    ASSERT_FALSE(body.is_discarded()) << text;
    FakeEndpoints endpoints;
    prepare(endpoints, body, verb);
    Driver driver(endpoints, [&](const NetworkId& id) {
      const auto found = endpoints.networks.find(id);
      return found == endpoints.networks.end() ? std::nullopt : std::optional(found->second);
    });
    const http::Response answer = driver.handle({captured.value("method", "POST"), path, text, {}});
    verbs[file.parent_path().filename().string()].insert(verb);
    if (body.empty() && verb != "Activate" && verb != "GetCapabilities" &&
        verb.rfind("Discover", 0) != 0) {
      EXPECT_EQ(answer.status, 400);  // a captured retry
      EXPECT_EQ(endpoints.count("suspect_orphans"), 1U);
      continue;
    }
    expect_by_verb(verb, body, answer, endpoints);
  }
  EXPECT_FALSE(verbs.empty()) << "no captures in " << AGENTGATE_GOLDEN;
  for (const auto& [engine, seen] : verbs) {
    for (const char* verb : {"Activate", "GetCapabilities", "CreateNetwork", "CreateEndpoint",
                             "Join", "EndpointOperInfo", "Leave", "DeleteEndpoint", "DeleteNetwork",
                             "ProgramExternalConnectivity", "RevokeExternalConnectivity"}) {
      EXPECT_EQ(seen.count(verb), 1U) << "no capture of " << engine << " has " << verb;
    }
  }
}

}  // namespace
}  // namespace agentgate::driver

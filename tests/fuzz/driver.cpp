// SPDX-License-Identifier: GPL-2.0-or-later
//
// Requests to the driver: the first byte chooses the verb, the rest is the body. Whatever comes,
// the answer is JSON, has "Err" exactly when it is not 200, and what reaches the host is sound.
#include <spdlog/spdlog.h>

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "plugin/driver/driver.h"
#include "tests/unit/driver/fake_endpoints.h"

namespace {

void require(bool sound) {
  if (!sound) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace agentgate;
  static const std::vector<std::string> paths = driver::Driver::paths();
  static const bool quiet = (spdlog::set_level(spdlog::level::off), true);
  if (size == 0 || !quiet) return 0;
  const std::string body(reinterpret_cast<const char*>(data) + 1, size - 1);

  driver::FakeEndpoints endpoints;
  driver::Driver driver(endpoints, {});
  const std::string& path = paths[data[0] % paths.size()];
  const http::Response answer = driver.handle({"POST", path, body, {}});
  const auto parsed = nlohmann::json::parse(answer.body, nullptr, false);
  require(parsed.is_object());
  require(parsed.contains("Err") == (answer.status != 200));

  for (const auto& [id, network] : endpoints.networks) {
    require(id == network.id && !id.empty());
    require(network.gateway4 || network.gateway6);
    require(network.mtu >= 576 && network.mtu <= 65535 &&
            (!network.gateway6 || network.mtu >= 1280));
    require(check_policy_name(network.policy).has_value());
    if (network.gateway4) require(network.gateway4->length >= 1 && network.gateway4->length <= 30);
    if (network.gateway6) require(network.gateway6->length >= 1 && network.gateway6->length <= 126);
  }
  if (const auto request = driver::decode_create_endpoint(body)) {
    const EndpointRecord& endpoint = request->endpoint;
    require(!endpoint.id.empty() && !endpoint.network.empty());
    require(endpoint.address4 || endpoint.address6);
    require(!endpoint.mac.is_zero() && !endpoint.mac.is_multicast());
    require(endpoint.policy.empty() || check_policy_name(endpoint.policy).has_value());
    require(!endpoint.release && !endpoint.prepared && endpoint.sandbox_key.empty());
  }
  return 0;
}

// SPDX-License-Identifier: GPL-2.0-or-later
//
// host::Endpoints in memory: what the driver would ask of the kernel and the disk, with the rules
// of host.h, and a log of the calls.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "plugin/host/host.h"

namespace agentgate::driver {

class FakeEndpoints : public host::Endpoints {
 public:
  std::map<NetworkId, NetworkRecord> networks;
  std::map<EndpointId, EndpointRecord> endpoints;
  std::vector<std::string> calls;
  std::optional<Error> next_error;  // the next call fails with it

  Status create_network(const NetworkRecord& network) override {
    if (Status status = begin("create_network"); !status) return status;
    const auto known = networks.find(network.id);
    const bool used = std::any_of(endpoints.begin(), endpoints.end(), [&](const auto& entry) {
      return entry.second.network == network.id;
    });
    if (known != networks.end() && !(known->second == network) && used) {
      return fail("create network", "it exists with other options", EEXIST);
    }
    networks[network.id] = network;
    return {};
  }
  Status delete_network(const NetworkId& id) override {
    if (Status status = begin("delete_network"); !status) return status;
    networks.erase(id);
    return {};
  }
  Status create_endpoint(const EndpointRecord& endpoint) override {
    if (Status status = begin("create_endpoint"); !status) return status;
    if (networks.count(endpoint.network) == 0) {
      return fail("create endpoint", "network is not known", ENOENT);
    }
    endpoints[endpoint.id] = endpoint;
    return {};
  }
  Status delete_endpoint(const EndpointId& id) override {
    if (Status status = begin("delete_endpoint"); !status) return status;
    endpoints.erase(id);
    return {};
  }
  Result<host::Port> join(const EndpointId& id, const std::string& sandbox_key) override {
    if (Status status = begin("join"); !status) return tl::unexpected(status.error());
    const auto found = endpoints.find(id);
    if (found == endpoints.end()) return fail("join", "the endpoint is not known", ENOENT);
    found->second.sandbox_key = sandbox_key;
    return host::Port{found->second, networks.at(found->second.network)};
  }
  Status leave(const EndpointId& id) override {
    if (Status status = begin("leave"); !status) return status;
    const auto found = endpoints.find(id);
    if (found != endpoints.end()) found->second.release.reset();
    return {};
  }
  void suspect_orphans() override { calls.emplace_back("suspect_orphans"); }
  void engine_seen() override { calls.emplace_back("engine_seen"); }

  [[nodiscard]] std::size_t count(const std::string& call) const {
    return static_cast<std::size_t>(std::count(calls.begin(), calls.end(), call));
  }

 private:
  Status begin(const std::string& call) {
    calls.push_back(call);
    if (!next_error) return {};
    Error error = *next_error;
    next_error.reset();
    return tl::unexpected(error);
  }
};

}  // namespace agentgate::driver

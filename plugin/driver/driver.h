// SPDX-License-Identifier: GPL-2.0-or-later
//
// Driver: the verbs of libnetwork's remote driver protocol, each one answered from the host.
//
// It owns nothing and remembers nothing: a request is decoded, the host is asked, the answer is
// encoded. It knows neither the kernel nor Docker's API, and never calls Docker: Docker holds
// locks while it waits for us. Every verb can be repeated and takes unknown ids.
//
// Threading: handle() may be called from any thread. It ends when the host does (a bounded time).
// Errors become {"Err": text}: 400 for the request, 409 for what is taken or in use, 500 else;
// 404 for an unknown verb only, since Docker reads 404 as "not implemented".
// Logging: what is refused as a warning, everything else as debug.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plugin/driver/codec.h"
#include "plugin/host/host.h"
#include "plugin/http/server.h"

namespace agentgate::driver {

// The network, if it is known; used to check an endpoint's addresses before it is made.
using NetworkLookup = std::function<std::optional<NetworkRecord>(const NetworkId&)>;

class Driver {
 public:
  // Both outlive the driver.
  Driver(host::Endpoints& endpoints, NetworkLookup lookup);

  [[nodiscard]] http::Response handle(const http::Request& request);

  // The paths that handle() knows, sorted.
  [[nodiscard]] static std::vector<std::string> paths();

 private:
  using Answer = Result<std::string>;
  struct Verb;
  static const std::vector<Verb>& verbs();

  Answer activate(const std::string& body);
  Answer capabilities(const std::string& body);
  Answer nothing(const std::string& body);
  Answer gateway_allocation(const std::string& body);
  Answer global_scope(const std::string& body);
  Answer create_network(const std::string& body);
  Answer delete_network(const std::string& body);
  Answer create_endpoint(const std::string& body);
  Answer delete_endpoint(const std::string& body);
  Answer endpoint_info(const std::string& body);
  Answer join(const std::string& body);
  Answer leave(const std::string& body);
  Answer external_connectivity(const std::string& body);

  host::Endpoints& endpoints_;
  NetworkLookup lookup_;
};

}  // namespace agentgate::driver

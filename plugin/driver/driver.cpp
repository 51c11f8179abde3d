// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/driver/driver.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "plugin/failpoint.h"

namespace agentgate::driver {
namespace {

// The host's words, without the errno that says nothing to somebody who ran `docker run`.
std::string text_for_docker(const Error& error) {
  if (error.code == EINVAL || error.code == EEXIST || error.code == EADDRINUSE ||
      error.code == ENOENT || error.code == EBUSY || error.code == ENOSPC) {
    return "agentgate: " + error.operation + ": " + error.text;
  }
  return "agentgate: " + error.to_string();
}

int status_of(const Error& error) {
  switch (error.code) {
    case EINVAL:
    case ENOENT:
      return 400;
    case EEXIST:
    case EADDRINUSE:
    case EBUSY:
    case ENOSPC:
      return 409;
    default:
      return 500;
  }
}

bool is_blank(const std::string& body) {
  return body.find_first_not_of(" \t\r\n") == std::string::npos;
}

// A status with nothing in it, as an answer.
Result<std::string> done(const Status& status) {
  if (!status) return tl::unexpected(status.error());
  return encode_nothing();
}

}  // namespace

struct Driver::Verb {
  const char* path;
  Answer (Driver::*run)(const std::string& body);
  bool needs_body;
};

const std::vector<Driver::Verb>& Driver::verbs() {
  static const std::vector<Verb> all{
      {"/Plugin.Activate", &Driver::activate, false},
      {"/NetworkDriver.GetCapabilities", &Driver::capabilities, false},
      {"/NetworkDriver.GwAllocCheck", &Driver::gateway_allocation, false},
      {"/NetworkDriver.AllocateNetwork", &Driver::global_scope, false},
      {"/NetworkDriver.FreeNetwork", &Driver::global_scope, false},
      {"/NetworkDriver.CreateNetwork", &Driver::create_network, true},
      {"/NetworkDriver.DeleteNetwork", &Driver::delete_network, true},
      {"/NetworkDriver.CreateEndpoint", &Driver::create_endpoint, true},
      {"/NetworkDriver.EndpointOperInfo", &Driver::endpoint_info, true},
      {"/NetworkDriver.DeleteEndpoint", &Driver::delete_endpoint, true},
      {"/NetworkDriver.Join", &Driver::join, true},
      {"/NetworkDriver.Leave", &Driver::leave, true},
      {"/NetworkDriver.ProgramExternalConnectivity", &Driver::external_connectivity, true},
      {"/NetworkDriver.RevokeExternalConnectivity", &Driver::external_connectivity, true},
      {"/NetworkDriver.DiscoverNew", &Driver::nothing, false},
      {"/NetworkDriver.DiscoverDelete", &Driver::nothing, false},
  };
  return all;
}

Driver::Driver(host::Endpoints& endpoints, NetworkLookup lookup)
    : endpoints_(endpoints), lookup_(std::move(lookup)) {}

std::vector<std::string> Driver::paths() {
  std::vector<std::string> out;
  for (const Verb& verb : verbs()) out.emplace_back(verb.path);
  std::sort(out.begin(), out.end());
  return out;
}

http::Response Driver::handle(const http::Request& request) {
  const auto& all = verbs();
  const auto verb = std::find_if(all.begin(), all.end(),
                                 [&](const Verb& entry) { return request.path == entry.path; });
  if (verb == all.end()) {
    return {404, encode_error("agentgate: no such verb"), "application/json"};
  }
  if (request.method != "POST") {
    return {405, encode_error("agentgate: send POST"), "application/json"};
  }
  if (verb->needs_body && is_blank(request.body)) {
    // What the first try made belongs to nobody if its answer got lost.
    endpoints_.suspect_orphans();
    spdlog::warn("{}: no body: Docker repeats a request after a lost connection", verb->path);
    return {400,
            encode_error("agentgate: the request came without its body, as it does when Docker "
                         "repeats it after a lost connection; do it again"),
            "application/json"};
  }
  const std::string point = "driver." + request.path.substr(request.path.find('.') + 1);
  failpoint(point + ".begin");
  const Answer answer = (this->*verb->run)(request.body);
  failpoint(point + ".done");
  if (!answer) {
    const std::string text = text_for_docker(answer.error());
    spdlog::warn("{} refused: {}", verb->path, text);
    return {status_of(answer.error()), encode_error(text), "application/json"};
  }
  spdlog::debug("{}: {}", verb->path, *answer);
  return {200, *answer, "application/json"};
}

Driver::Answer Driver::activate(const std::string& /*body*/) {
  endpoints_.engine_seen();
  return encode_activate();
}

Driver::Answer Driver::capabilities(const std::string& /*body*/) {
  endpoints_.engine_seen();
  return encode_capabilities();
}

Driver::Answer Driver::nothing(const std::string& /*body*/) { return encode_nothing(); }

Driver::Answer Driver::gateway_allocation(const std::string& /*body*/) {
  return encode_gateway_allocation();
}

Driver::Answer Driver::global_scope(const std::string& /*body*/) {
  return fail("scope", "agentgate networks are local to a host; leave out --scope global", EINVAL);
}

Driver::Answer Driver::create_network(const std::string& body) {
  const auto network = decode_create_network(body);
  if (!network) return tl::unexpected(network.error());
  return done(endpoints_.create_network(*network));
}

Driver::Answer Driver::delete_network(const std::string& body) {
  const auto network = decode_network(body);
  if (!network) return tl::unexpected(network.error());
  return done(endpoints_.delete_network(*network));
}

Driver::Answer Driver::create_endpoint(const std::string& body) {
  const auto request = decode_create_endpoint(body);
  if (!request) return tl::unexpected(request.error());
  if (lookup_) {
    if (const auto network = lookup_(request->endpoint.network)) {
      if (const Status fits = check_addresses(request->endpoint, *network); !fits) {
        return tl::unexpected(fits.error());
      }
    }
  }
  const Status made = endpoints_.create_endpoint(request->endpoint);
  if (!made) return tl::unexpected(made.error());
  return encode_create_endpoint(*request);
}

Driver::Answer Driver::delete_endpoint(const std::string& body) {
  const auto request = decode_endpoint(body);
  if (!request) return tl::unexpected(request.error());
  return done(endpoints_.delete_endpoint(request->endpoint));
}

Driver::Answer Driver::endpoint_info(const std::string& body) {
  const auto request = decode_endpoint(body);
  if (!request) return tl::unexpected(request.error());
  return encode_endpoint_info(request->endpoint);
}

Driver::Answer Driver::join(const std::string& body) {
  const auto request = decode_join(body);
  if (!request) return tl::unexpected(request.error());
  const auto port = endpoints_.join(request->endpoint, request->sandbox_key);
  if (!port) return tl::unexpected(port.error());
  if (port->network.id != request->network) {
    return fail("Join", "endpoint " + request->endpoint.str() + " is on another network", EINVAL);
  }
  return encode_join(*port);
}

Driver::Answer Driver::leave(const std::string& body) {
  const auto request = decode_endpoint(body);
  if (!request) return tl::unexpected(request.error());
  return done(endpoints_.leave(request->endpoint));
}

// Nothing is ever published; the ports that come along belong to the container's other networks.
Driver::Answer Driver::external_connectivity(const std::string& body) {
  const auto request = decode_endpoint(body);
  if (!request) return tl::unexpected(request.error());
  return encode_nothing();
}

}  // namespace agentgate::driver

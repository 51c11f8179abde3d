// SPDX-License-Identifier: GPL-2.0-or-later
//
// The JSON of libnetwork's remote driver protocol, both ways (docs/driver.md).
//
// Requests become the records that the host works with, checked as far as one request can be
// checked by itself; what Docker sends beyond that and means nothing here is ignored, what a
// person asked for and would not get is refused. Pure functions, any thread, never throw.
// Errors: EINVAL; `text` names the field, says what is wrong with it and what to do instead, and
// is what Docker shows to the user.
#pragma once

#include <string>
#include <string_view>

#include "netdriver/error.h"
#include "plugin/host/host.h"
#include "plugin/model.h"

namespace agentgate::driver {

struct CreateEndpointRequest {
  EndpointRecord endpoint;     // with a MAC in any case
  bool mac_requested = false;  // the MAC came with the request: it must not come back
};

struct EndpointRequest {
  NetworkId network;
  EndpointId endpoint;
};

struct JoinRequest {
  NetworkId network;
  EndpointId endpoint;
  std::string sandbox_key;
};

[[nodiscard]] Result<NetworkRecord> decode_create_network(std::string_view body);
[[nodiscard]] Result<CreateEndpointRequest> decode_create_endpoint(std::string_view body);
[[nodiscard]] Result<JoinRequest> decode_join(std::string_view body);
// Leave, DeleteEndpoint, EndpointOperInfo, Program- and RevokeExternalConnectivity.
[[nodiscard]] Result<EndpointRequest> decode_endpoint(std::string_view body);
// DeleteNetwork.
[[nodiscard]] Result<NetworkId> decode_network(std::string_view body);

// What needs both: the endpoint's addresses are in the network's subnets and nobody else's by
// definition (network, broadcast, gateway).
[[nodiscard]] Status check_addresses(const EndpointRecord& endpoint, const NetworkRecord& network);

[[nodiscard]] std::string encode_activate();
[[nodiscard]] std::string encode_capabilities();
[[nodiscard]] std::string encode_nothing();
[[nodiscard]] std::string encode_create_endpoint(const CreateEndpointRequest& made);
[[nodiscard]] std::string encode_join(const host::Port& port);
[[nodiscard]] std::string encode_endpoint_info(const EndpointId& endpoint);
// GwAllocCheck: Docker shall allocate the gateways.
[[nodiscard]] std::string encode_gateway_allocation();
[[nodiscard]] std::string encode_error(const std::string& text);

}  // namespace agentgate::driver

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/driver/codec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

namespace agentgate::driver {
namespace {

using nlohmann::json;

constexpr std::uint32_t kLeastMtu = 576;     // RFC 791: what every host must take
constexpr std::uint32_t kLeastMtuV6 = 1280;  // RFC 8200, 5
constexpr std::uint32_t kMostMtu = 65535;

constexpr const char* kGeneric = "com.docker.network.generic";
constexpr const char* kPortMap = "com.docker.network.portmap";

// A name or value of somebody else's for a message: one line, not too long.
std::string in_quotes(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 80)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (text.size() > 80 ? "…'" : "'");
}

tl::unexpected<Error> refuse(const std::string& field, const std::string& text) {
  return fail(field, text, EINVAL);
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// -- typed access: a field that is absent or null is nothing, one of another type an error --------

const json* find(const json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() || at->is_null() ? nullptr : &*at;
}

Result<json> parse_object(std::string_view body) {
  json out = json::parse(body, nullptr, false);
  if (out.is_discarded()) return refuse("body", "is not JSON");
  if (!out.is_object()) return refuse("body", "is not a JSON object");
  return out;
}

Result<std::string> text_of(const json& object, const char* key, const std::string& field) {
  const json* value = find(object, key);
  if (value == nullptr) return std::string();
  if (!value->is_string()) return refuse(field, "must be a string");
  return value->get<std::string>();
}

Result<bool> flag_of(const json& object, const char* key) {
  const json* value = find(object, key);
  if (value == nullptr) return false;
  if (value->is_boolean()) return value->get<bool>();
  // 20.10 forwards some flags as the text that the user gave.
  if (value->is_string()) {
    const auto& text = value->get_ref<const std::string&>();
    if (text == "true" || text == "1") return true;
    if (text == "false" || text == "0" || text.empty()) return false;
  }
  return refuse(key, "must be true or false");
}

Result<json> object_of(const json& object, const char* key, const std::string& field) {
  const json* value = find(object, key);
  if (value == nullptr) return json::object();
  if (!value->is_object()) return refuse(field, "must be an object");
  return *value;
}

template <class Id>
Result<Id> id_of(const json& object, const char* key) {
  const auto text = text_of(object, key, key);
  if (!text) return tl::unexpected(text.error());
  if (text->empty()) return refuse(key, "is missing");
  auto id = Id::parse(*text);
  if (!id) return refuse(key, id.error().text);
  return *id;
}

// -- network -------------------------------------------------------------------------------------

// "0.0.0.0/0" and nothing are what the null IPAM driver gives.
template <class Address>
Result<std::optional<BasicInterfaceAddress<Address>>> gateway_of(const json& request,
                                                                 const char* key,
                                                                 const char* flag) {
  const json* pools = find(request, key);
  if (pools == nullptr) return std::nullopt;
  if (!pools->is_array()) return refuse(key, "must be a list");
  if (pools->empty()) return std::nullopt;
  if (pools->size() > 1) {
    return refuse(key, "more than one subnet of a family; make one network for each");
  }
  const json& entry = pools->front();
  const std::string where = std::string(key) + "[0]";
  if (!entry.is_object()) return refuse(where, "must be an object");
  const auto pool_text = text_of(entry, "Pool", where + ".Pool");
  if (!pool_text) return tl::unexpected(pool_text.error());
  const auto gateway_text = text_of(entry, "Gateway", where + ".Gateway");
  if (!gateway_text) return tl::unexpected(gateway_text.error());
  if (pool_text->empty()) {
    return refuse(where + ".Pool", std::string("the network has no subnet; give one with ") + flag);
  }
  const auto pool = BasicPrefix<Address>::parse(*pool_text);
  if (!pool) return refuse(where + ".Pool", pool.error().text);
  if (pool->length() == 0) {
    return refuse(where + ".Pool", std::string("the subnet ") + *pool_text +
                                       " is everything; give a real one with " + flag +
                                       " (--ipam-driver null does not fit)");
  }
  if (pool->length() > Address::bits - 2) {
    return refuse(where + ".Pool",
                  "the subnet " + *pool_text + " has no room for a gateway and a container");
  }
  if (gateway_text->empty()) {
    return refuse(where + ".Gateway",
                  "the network has no gateway in " + *pool_text + "; give one with --gateway");
  }
  const auto gateway = BasicInterfaceAddress<Address>::parse(*gateway_text);
  if (!gateway) return refuse(where + ".Gateway", gateway.error().text);
  const BasicInterfaceAddress<Address> out{gateway->address, pool->length()};
  if (!pool->contains(gateway->address)) {
    return refuse(where + ".Gateway", *gateway_text + " is not in the subnet " + *pool_text);
  }
  if (gateway->address == pool->first() ||
      (Address::family == Family::ipv4 && gateway->address == pool->last())) {
    return refuse(where + ".Gateway", *gateway_text +
                                          " is the network's own or broadcast address of " +
                                          *pool_text + "; choose another with --gateway");
  }
  if (const json* aux = find(entry, "AuxAddresses"); aux != nullptr && !aux->is_object()) {
    return refuse(where + ".AuxAddresses", "must be an object");
  }
  return out;
}

constexpr const char* kNetworkKeys = "agentgate.policy, agentgate.mtu and agentgate.masquerade";

Status read_network_option(const std::string& key, const json& node, NetworkRecord& out) {
  if (starts_with(key, "com.docker.")) {
    if (key == "com.docker.network.driver.mtu") {
      return refuse(key, "has no effect here; use -o agentgate.mtu=BYTES");
    }
    if (key == "com.docker.network.bridge.enable_ip_masquerade") {
      return refuse(key, "has no effect here; use -o agentgate.masquerade=true|false");
    }
    return refuse(key.substr(0, 80),
                  std::string("has no effect here; the options of a network are ") + kNetworkKeys);
  }
  if (!node.is_string()) return refuse(key.substr(0, 80), "must be a string");
  const auto& value = node.get_ref<const std::string&>();
  if (key == "agentgate.policy") {
    if (const Status good = check_policy_name(value); !good) return refuse(key, good.error().text);
    out.policy = value;
    return {};
  }
  if (key == "agentgate.mtu") {
    std::uint32_t mtu = 0;
    const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), mtu);
    if (code != std::errc() || end != value.data() + value.size() || mtu < kLeastMtu ||
        mtu > kMostMtu) {
      return refuse(key, "must be a number of bytes from 576 to 65535, not " + in_quotes(value));
    }
    out.mtu = mtu;
    return {};
  }
  if (key == "agentgate.masquerade") {
    if (value != "true" && value != "false") {
      return refuse(key, "must be true or false, not " + in_quotes(value));
    }
    out.masquerade = value == "true";
    return {};
  }
  return refuse(in_quotes(key),
                std::string("is not an option that agentgate knows; there are ") + kNetworkKeys);
}

Status read_network_options(const json& options, NetworkRecord& out) {
  const auto internal = flag_of(options, "com.docker.network.internal");
  if (!internal) return tl::unexpected(internal.error());
  if (*internal) {
    return refuse("com.docker.network.internal",
                  "agentgate networks are closed by default, leave out --internal; for containers "
                  "that shall stay without destinations use a policy without any");
  }
  for (const auto& [key, value] : options.items()) {
    // Docker itself sets what is next to "generic"; a newer engine may have more to say.
    if (!starts_with(key, "com.docker.network.")) {
      return refuse(in_quotes(key), "is not an option of Docker's");
    }
  }
  const auto generic = object_of(options, kGeneric, kGeneric);
  if (!generic) return tl::unexpected(generic.error());
  for (const auto& [key, value] : generic->items()) {
    if (Status read = read_network_option(key, value, out); !read) return read;
  }
  return {};
}

// -- endpoint ------------------------------------------------------------------------------------

template <class Address>
Result<std::optional<Address>> address_of(const json& interface, const char* key) {
  const std::string field = std::string("Interface.") + key;
  const auto text = text_of(interface, key, field);
  if (!text) return tl::unexpected(text.error());
  if (text->empty()) return std::nullopt;
  const auto parsed = BasicInterfaceAddress<Address>::parse(*text);
  if (!parsed) return refuse(field, parsed.error().text);
  if (parsed->address.is_unspecified()) return refuse(field, *text + " is not an address");
  return parsed->address;
}

Result<std::optional<MacAddress>> mac_requested(const json& interface) {
  const auto text = text_of(interface, "MacAddress", "Interface.MacAddress");
  if (!text) return tl::unexpected(text.error());
  if (text->empty()) return std::nullopt;
  const auto mac = MacAddress::parse(*text);
  if (!mac) return refuse("Interface.MacAddress", mac.error().text);
  if (mac->is_multicast() || mac->is_zero()) {
    return refuse("Interface.MacAddress",
                  *text + " is not an address that a container can have (multicast or zero)");
  }
  return *mac;
}

// Docker's own keys; all but the port map change nothing about the port.
constexpr std::array kEndpointKeys{
    "com.docker.network.endpoint.exposedports",
    "com.docker.network.endpoint.macaddress",
    "com.docker.network.endpoint.dnsservers",
    "com.docker.network.endpoint.sysctls",
    "com.docker.network.endpoint.ifname",
    "com.docker.network.driver.private.no_proxy_6to4",
    "com.docker.network.generic",
};

Status read_endpoint_option(const std::string& key, const json& value, EndpointRecord& out) {
  if (key == "agentgate.policy") {
    if (!value.is_string()) return refuse(key, "must be a string");
    if (const Status good = check_policy_name(value.get_ref<const std::string&>()); !good) {
      return refuse(key, good.error().text);
    }
    out.policy = value.get<std::string>();
    return {};
  }
  if (key == kPortMap) {
    if (value.is_null() || (value.is_array() && value.empty())) return {};
    return refuse(key,
                  "ports cannot be published from an agentgate network, nothing reaches the "
                  "container from outside; leave out -p, --publish and -P (EXPOSE alone is fine)");
  }
  if (std::find(kEndpointKeys.begin(), kEndpointKeys.end(), key) != kEndpointKeys.end()) return {};
  // A driver-opt of a user's is always a string; what else stands here is a newer engine's.
  if (starts_with(key, "com.docker.network.") && !value.is_string()) return {};
  return refuse(in_quotes(key),
                "is not an option that agentgate knows for an endpoint; there is agentgate.policy");
}

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

template <class Address>
Status check_address(const std::optional<Address>& address,
                     const std::optional<BasicInterfaceAddress<Address>>& gateway,
                     const std::string& field) {
  if (!address) return {};
  if (!gateway) {
    return refuse(field, address->to_string() + ": the network has no subnet of that family");
  }
  const auto pool = gateway->prefix();
  if (!pool.contains(*address)) {
    return refuse(field,
                  address->to_string() + " is not in the network's subnet " + pool.to_string());
  }
  if (*address == gateway->address) {
    return refuse(field, address->to_string() + " is the network's gateway");
  }
  if (*address == pool.first() || (Address::family == Family::ipv4 && *address == pool.last())) {
    return refuse(field, address->to_string() + " is the network's own or broadcast address of " +
                             pool.to_string());
  }
  return {};
}

// nlohmann throws for want of memory, and nothing else is expected to; this keeps the promise.
template <class T, class Function>
Result<T> without_exceptions(Function function) {
  try {
    return function();
  } catch (const std::exception&) {
    return refuse("body", "cannot be read");
  }
}

}  // namespace

Result<NetworkRecord> decode_create_network(std::string_view body) {
  return without_exceptions<NetworkRecord>([&]() -> Result<NetworkRecord> {
    const auto request = parse_object(body);
    if (!request) return tl::unexpected(request.error());
    NetworkRecord out;
    out.policy = "default";
    const auto id = id_of<NetworkId>(*request, "NetworkID");
    if (!id) return tl::unexpected(id.error());
    out.id = *id;
    const auto options = object_of(*request, "Options", "Options");
    if (!options) return tl::unexpected(options.error());
    if (const Status read = read_network_options(*options, out); !read) {
      return tl::unexpected(read.error());
    }
    const auto gateway4 = gateway_of<Ipv4Address>(*request, "IPv4Data", "--subnet");
    if (!gateway4) return tl::unexpected(gateway4.error());
    const auto gateway6 = gateway_of<Ipv6Address>(*request, "IPv6Data", "--ipv6 --subnet");
    if (!gateway6) return tl::unexpected(gateway6.error());
    out.gateway4 = *gateway4;
    out.gateway6 = *gateway6;
    if (!out.gateway4 && !out.gateway6) {
      return refuse("IPv4Data", "the network has no subnet; give one with --subnet");
    }
    if (out.gateway6 && out.mtu < kLeastMtuV6) {
      return refuse("agentgate.mtu",
                    "must be at least 1280 on a network with IPv6, not " + std::to_string(out.mtu));
    }
    return out;
  });
}

Result<CreateEndpointRequest> decode_create_endpoint(std::string_view body) {
  return without_exceptions<CreateEndpointRequest>([&]() -> Result<CreateEndpointRequest> {
    const auto request = parse_object(body);
    if (!request) return tl::unexpected(request.error());
    CreateEndpointRequest out;
    const auto network = id_of<NetworkId>(*request, "NetworkID");
    if (!network) return tl::unexpected(network.error());
    const auto endpoint = id_of<EndpointId>(*request, "EndpointID");
    if (!endpoint) return tl::unexpected(endpoint.error());
    out.endpoint.network = *network;
    out.endpoint.id = *endpoint;
    const auto interface = object_of(*request, "Interface", "Interface");
    if (!interface) return tl::unexpected(interface.error());
    const auto address4 = address_of<Ipv4Address>(*interface, "Address");
    if (!address4) return tl::unexpected(address4.error());
    const auto address6 = address_of<Ipv6Address>(*interface, "AddressIPv6");
    if (!address6) return tl::unexpected(address6.error());
    out.endpoint.address4 = *address4;
    out.endpoint.address6 = *address6;
    if (!out.endpoint.address4 && !out.endpoint.address6) {
      return refuse("Interface.Address", "the endpoint has no address; its network needs a subnet");
    }
    const auto mac = mac_requested(*interface);
    if (!mac) return tl::unexpected(mac.error());
    out.mac_requested = mac->has_value();
    out.endpoint.mac = mac->value_or(mac_of(endpoint->str()));
    const auto options = object_of(*request, "Options", "Options");
    if (!options) return tl::unexpected(options.error());
    for (const auto& [key, value] : options->items()) {
      if (const Status read = read_endpoint_option(key, value, out.endpoint); !read) {
        return tl::unexpected(read.error());
      }
    }
    return out;
  });
}

Result<JoinRequest> decode_join(std::string_view body) {
  return without_exceptions<JoinRequest>([&]() -> Result<JoinRequest> {
    const auto request = parse_object(body);
    if (!request) return tl::unexpected(request.error());
    const auto network = id_of<NetworkId>(*request, "NetworkID");
    if (!network) return tl::unexpected(network.error());
    const auto endpoint = id_of<EndpointId>(*request, "EndpointID");
    if (!endpoint) return tl::unexpected(endpoint.error());
    auto key = text_of(*request, "SandboxKey", "SandboxKey");
    if (!key) return tl::unexpected(key.error());
    if (key->empty() || key->front() != '/' || key->size() >= 4096 ||
        key->find('\0') != std::string::npos) {
      return refuse("SandboxKey", "must be an absolute path, not " + in_quotes(*key));
    }
    return JoinRequest{*network, *endpoint, std::move(*key)};
  });
}

Result<EndpointRequest> decode_endpoint(std::string_view body) {
  return without_exceptions<EndpointRequest>([&]() -> Result<EndpointRequest> {
    const auto request = parse_object(body);
    if (!request) return tl::unexpected(request.error());
    const auto network = id_of<NetworkId>(*request, "NetworkID");
    if (!network) return tl::unexpected(network.error());
    const auto endpoint = id_of<EndpointId>(*request, "EndpointID");
    if (!endpoint) return tl::unexpected(endpoint.error());
    return EndpointRequest{*network, *endpoint};
  });
}

Result<NetworkId> decode_network(std::string_view body) {
  return without_exceptions<NetworkId>([&]() -> Result<NetworkId> {
    const auto request = parse_object(body);
    if (!request) return tl::unexpected(request.error());
    return id_of<NetworkId>(*request, "NetworkID");
  });
}

Status check_addresses(const EndpointRecord& endpoint, const NetworkRecord& network) {
  if (Status good = check_address(endpoint.address4, network.gateway4, "Interface.Address");
      !good) {
    return good;
  }
  return check_address(endpoint.address6, network.gateway6, "Interface.AddressIPv6");
}

std::string encode_activate() { return R"({"Implements":["NetworkDriver"]})"; }

std::string encode_capabilities() { return R"({"Scope":"local","ConnectivityScope":"local"})"; }

std::string encode_nothing() { return "{}"; }

std::string encode_create_endpoint(const CreateEndpointRequest& made) {
  json interface = json::object();
  // Docker takes any value that it gave itself and gets back for an attempt to change it.
  if (!made.mac_requested) interface["MacAddress"] = made.endpoint.mac.to_string();
  return dump({{"Interface", std::move(interface)}});
}

std::string encode_join(const host::Port& port) {
  // Two half routes instead of a gateway: Docker then neither adds an interface on docker_gwbridge
  // nor lets its resolver ask upstream from the host's namespace (engines from 25.0.5).
  json routes = json::array();
  const auto add = [&](const char* destination, const std::string& next_hop) {
    routes.push_back({{"Destination", destination}, {"RouteType", 0}, {"NextHop", next_hop}});
  };
  if (port.network.gateway4 && port.endpoint.address4) {
    const std::string gateway = port.network.gateway4->address.to_string();
    add("0.0.0.0/1", gateway);
    add("128.0.0.0/1", gateway);
  }
  if (port.network.gateway6 && port.endpoint.address6) {
    const std::string gateway = port.network.gateway6->address.to_string();
    add("::/1", gateway);
    add("8000::/1", gateway);
  }
  return dump(
      {{"InterfaceName", {{"SrcName", peer_name(port.endpoint.id).str()}, {"DstPrefix", "eth"}}},
       {"Gateway", ""},
       {"GatewayIPv6", ""},
       {"StaticRoutes", std::move(routes)},
       {"DisableGatewayService", true}});
}

std::string encode_endpoint_info(const EndpointId& endpoint) {
  return dump({{"Value", {{"agentgate.port", port_name(endpoint).str()}}}});
}

std::string encode_gateway_allocation() { return R"({"SkipIPv4":false,"SkipIPv6":false})"; }

std::string encode_error(const std::string& text) { return dump({{"Err", text}}); }

}  // namespace agentgate::driver

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/model.h"

#include <algorithm>
#include <ctime>

namespace agentgate {
namespace {

bool is_lower_alnum(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

InterfaceName link_name(const char* prefix, const std::string& id) {
  // An id has at least 12 characters [a-z0-9], so this is always a valid name.
  return InterfaceName::parse(prefix + id.substr(0, 10)).value();
}

}  // namespace

template <class Tag>
Result<DockerId<Tag>> DockerId<Tag>::parse(std::string_view text) {
  if (text.size() < 12 || text.size() > 64 ||
      !std::all_of(text.begin(), text.end(), is_lower_alnum)) {
    return fail("parse",
                "'" + std::string(text.substr(0, 80)) +
                    "' is not an identifier of Docker's (12 to 64 characters a-z, 0-9)",
                EINVAL);
  }
  DockerId id;
  id.text_ = std::string(text);
  return id;
}
template class DockerId<NetworkTag>;
template class DockerId<EndpointTag>;

InterfaceName bridge_name(const NetworkId& id) {
  return link_name(netdriver::kBridgePrefix, id.str());
}
InterfaceName port_name(const EndpointId& id) {
  return link_name(netdriver::kPortPrefix, id.str());
}
InterfaceName peer_name(const EndpointId& id) {
  return link_name(netdriver::kPeerPrefix, id.str());
}

MacAddress mac_of(std::string_view id) {
  // FNV-1a; the address must be stable and spread, not secret.
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : id) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  std::array<std::uint8_t, 6> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(hash >> (8 * i));
  }
  bytes[0] = 0x02;  // locally administered, unicast
  return MacAddress(bytes);
}

Status check_policy_name(std::string_view name) {
  const bool good = !name.empty() && name.size() <= 32 && is_lower_alnum(name[0]) &&
                    std::all_of(name.begin(), name.end(),
                                [](char c) { return is_lower_alnum(c) || c == '-' || c == '_'; });
  if (!good) {
    return fail("policy name",
                "'" + std::string(name.substr(0, 80)) +
                    "' is not a policy name: 1 to 32 characters a-z, 0-9, '-', '_', "
                    "the first one a letter or digit",
                EINVAL);
  }
  return {};
}

netdriver::NetworkSpec NetworkRecord::spec() const {
  netdriver::NetworkSpec out;
  out.bridge = bridge_name(id);
  out.mac = mac_of(id.str());
  out.gateway4 = gateway4;
  out.gateway6 = gateway6;
  out.mtu = mtu;
  out.masquerade = masquerade;
  return out;
}

netdriver::PortSpec EndpointRecord::spec(const NetworkRecord& of) const {
  netdriver::PortSpec out;
  out.name = port_name(id);
  out.peer = peer_name(id);
  out.bridge = bridge_name(of.id);
  out.mac = mac;
  out.address4 = address4;
  out.address6 = address6;
  out.bridge_mac = mac_of(of.id.str());
  if (of.gateway4) out.gateway4 = of.gateway4->address;
  if (of.gateway6) out.gateway6 = of.gateway6->address;
  out.mtu = of.mtu;
  out.prepared = prepared;
  if (release) {
    out.policy = release->policy;
    out.label = release->container_name;
  }
  return out;
}

std::string utc_now() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  char text[40];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::string out(text, length);
  const std::string milliseconds = std::to_string(1000 + now.tv_nsec / 1000000);
  return out + "." + milliseconds.substr(1) + "Z";
}

}  // namespace agentgate

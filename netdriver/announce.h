// SPDX-License-Identifier: GPL-2.0-or-later
//
// Tells a released container where its gateway is.
//
// What it sent while it was closed had no answer: its neighbour entry for the gateway is being
// probed or has failed, and its first packets after the release would wait for the next probe or
// fail with "no route to host". An ARP reply (RFC 826) and a neighbour advertisement (RFC 4861,
// 4.4) from the bridge end that. They pass the gate by the rules that are there for the answers to
// the container's own questions, so they open nothing (docs/decisions/0008).
// The frames are pure values; sending needs CAP_NET_RAW and a packet socket in the bridge's
// network namespace.
#pragma once

#include <cstdint>
#include <vector>

#include "netdriver/gate.h"
#include "netdriver/unique_fd.h"

namespace agentgate::netdriver {

// Ethernet frames without FCS, one for each family that the port has an address and a gateway of.
[[nodiscard]] std::vector<std::vector<std::uint8_t>> gateway_frames(const PortSpec& port);

// A packet socket of the calling thread's network namespace that hears nothing and sends with the
// verdict mark, which layer 1 asks of IPv6. EPERM without CAP_NET_RAW.
Result<UniqueFd> open_announcer();
// Sends the frames out of the bridge device with that index. ENXIO: no such link; ENETDOWN.
Status announce_gateway(int announcer, std::uint32_t bridge_index, const PortSpec& port);

}  // namespace agentgate::netdriver

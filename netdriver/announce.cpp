// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/announce.h"

// First: the kernel's headers give way to it, not the other way round.
#include <netinet/icmp6.h>
#include <netinet/in.h>

#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if_arp.h>
#include <sys/socket.h>

#include <cerrno>

namespace agentgate::netdriver {
namespace {

using Frame = std::vector<std::uint8_t>;

void put(Frame& frame, std::uint8_t byte) { frame.push_back(byte); }
void put16(Frame& frame, std::uint16_t value) {
  frame.push_back(static_cast<std::uint8_t>(value >> 8));
  frame.push_back(static_cast<std::uint8_t>(value & 0xFF));
}
template <class Address>
void put(Frame& frame, const Address& address) {
  frame.insert(frame.end(), address.bytes().begin(), address.bytes().end());
}

Frame ethernet(const PortSpec& port, std::uint16_t type) {
  Frame frame;
  put(frame, port.mac);
  put(frame, port.bridge_mac);
  put16(frame, type);
  return frame;
}

Frame arp_reply(const PortSpec& port) {
  Frame frame = ethernet(port, ETH_P_ARP);
  put16(frame, ARPHRD_ETHER);
  put16(frame, ETH_P_IP);
  put(frame, std::uint8_t{6});
  put(frame, std::uint8_t{4});
  put16(frame, ARPOP_REPLY);
  put(frame, port.bridge_mac);
  put(frame, *port.gateway4);
  put(frame, port.mac);
  put(frame, *port.address4);
  return frame;
}

// RFC 1071, over the pseudo header of RFC 8200, 8.1, and the message.
std::uint16_t checksum(const PortSpec& port, const Frame& message) {
  Frame all;
  put(all, *port.gateway6);
  put(all, *port.address6);
  put16(all, 0);
  put16(all, static_cast<std::uint16_t>(message.size()));
  put16(all, 0);
  put16(all, IPPROTO_ICMPV6);
  all.insert(all.end(), message.begin(), message.end());
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i + 1 < all.size(); i += 2) {
    sum += static_cast<std::uint32_t>(all[i] << 8 | all[i + 1]);
  }
  while ((sum >> 16) != 0) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum & 0xFFFF);
}

Frame neighbour_advertisement(const PortSpec& port) {
  Frame message;
  put(message, std::uint8_t{ND_NEIGHBOR_ADVERT});
  put(message, std::uint8_t{0});
  put16(message, 0);       // checksum
  put16(message, 0xA000);  // router, override; not solicited
  put16(message, 0);
  put(message, *port.gateway6);
  put(message, std::uint8_t{ND_OPT_TARGET_LINKADDR});
  put(message, std::uint8_t{1});  // in units of 8 bytes
  put(message, port.bridge_mac);
  const std::uint16_t sum = checksum(port, message);
  message[2] = static_cast<std::uint8_t>(sum >> 8);
  message[3] = static_cast<std::uint8_t>(sum & 0xFF);

  Frame frame = ethernet(port, ETH_P_IPV6);
  put16(frame, 0x6000);
  put16(frame, 0);
  put16(frame, static_cast<std::uint16_t>(message.size()));
  put(frame, std::uint8_t{IPPROTO_ICMPV6});
  put(frame, std::uint8_t{255});  // RFC 4861, 7.1.2
  put(frame, *port.gateway6);
  put(frame, *port.address6);
  frame.insert(frame.end(), message.begin(), message.end());
  return frame;
}

}  // namespace

std::vector<Frame> gateway_frames(const PortSpec& port) {
  std::vector<Frame> out;
  if (port.address4 && port.gateway4) out.push_back(arp_reply(port));
  if (port.address6 && port.gateway6) out.push_back(neighbour_advertisement(port));
  return out;
}

Result<UniqueFd> open_announcer() {
  UniqueFd packet(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0));
  if (!packet.valid()) return fail_errno("open packet socket");
  const std::uint32_t mark = kVerdictMark;
  if (::setsockopt(packet.get(), SOL_SOCKET, SO_MARK, &mark, sizeof mark) < 0) {
    return fail_errno("open packet socket", "mark");
  }
  return packet;
}

Status announce_gateway(int announcer, std::uint32_t bridge_index, const PortSpec& port) {
  sockaddr_ll to{};
  to.sll_family = AF_PACKET;
  to.sll_ifindex = static_cast<int>(bridge_index);
  for (const Frame& frame : gateway_frames(port)) {
    if (::sendto(announcer, frame.data(), frame.size(), 0, reinterpret_cast<const sockaddr*>(&to),
                 sizeof to) < 0) {
      return fail_errno("announce the gateway to " + port.name.str());
    }
  }
  return {};
}

}  // namespace agentgate::netdriver

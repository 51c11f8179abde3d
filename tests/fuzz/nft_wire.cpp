// SPDX-License-Identifier: GPL-2.0-or-later
//
// nftables answers and notifications of both kinds: no decoder reads past a message's end, and what
// decodes compares and prints without falling over.
#include <linux/netlink.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "netdriver/monitor.h"
#include "netdriver/nft_wire.h"

namespace {
namespace nft = agentgate::netdriver::nft;

template <class Value>
void compare_with_itself(const Value& value) {
  std::vector<agentgate::netdriver::Difference> out;
  nft::compare("fuzz", value, value, out);
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < sizeof(nlmsghdr)) return 0;
  // In a block of its own size, with the length that the socket would have checked.
  const auto block = std::make_unique<std::uint8_t[]>(size);
  std::memcpy(block.get(), data, size);
  const auto length = static_cast<std::uint32_t>(size);
  std::memcpy(block.get(), &length, sizeof length);
  const auto* message = reinterpret_cast<const nlmsghdr*>(block.get());

  (void)nft::wire::parse_table(message);
  if (const auto chain = nft::wire::parse_chain(message)) compare_with_itself(chain->chain);
  if (const auto rule = nft::wire::parse_rule(message)) (void)nft::to_string(rule->rule);
  if (const auto set = nft::wire::parse_set(message)) compare_with_itself(set->set);
  if (const auto elements = nft::wire::parse_elements(message)) {
    for (const auto& element : *elements) (void)nft::to_string(element);
  }
  agentgate::netdriver::Notices notices;
  std::map<std::uint32_t, agentgate::InterfaceName> names;
  agentgate::netdriver::Monitor::note_nft(message, 1, notices);
  agentgate::netdriver::Monitor::note_rtnl(message, names, notices);
  (void)notices.empty();
  return 0;
}

// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/gate_kernel.h"

#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "netdriver/announce.h"
#include "netdriver/nft_socket.h"
#include "netdriver/rtnl.h"
#include "netdriver/ruleset.h"
#include "netdriver/token.h"

namespace agentgate::netdriver {
namespace {

using nft::Batch;
using nft::Chain;
using nft::Element;
using nft::Family;
using ruleset::Placed;

// linux/netfilter/nf_tables.h of Debian 12 has no name for it (since 6.9).
constexpr std::uint32_t kTableOwner = 0x2;
constexpr std::uint32_t kTablePersist = 0x4;
constexpr Family kFamilies[] = {Family::netdev, Family::bridge, Family::inet};
constexpr int kRepairAttempts = 3;
constexpr std::uint8_t kForwarding = 3;  // BR_STATE_FORWARDING
constexpr std::uint8_t kAddrGenNone = 1;

std::string table_place(Family family) {
  return "table " + std::string(nft::to_string(family)) + " " + kTable;
}

void differ(std::vector<Difference>& out, const std::string& where, const std::string& expected,
            const std::string& found) {
  if (expected != found) out.push_back({where, expected, found});
}
void differ(std::vector<Difference>& out, const std::string& where, bool expected, bool found) {
  differ(out, where, std::string(expected ? "on" : "off"), std::string(found ? "on" : "off"));
}

void compare_flags(const std::string& where, const BridgePortFlags& expected,
                   const BridgePortFlags& found, std::vector<Difference>& out) {
  const auto flag = [&](const char* name, bool BridgePortFlags::*member) {
    differ(out, where + ", flag " + name, expected.*member, found.*member);
  };
  flag("isolated", &BridgePortFlags::isolated);
  flag("learning", &BridgePortFlags::learning);
  flag("locked", &BridgePortFlags::locked);
  flag("flood", &BridgePortFlags::unicast_flood);
  flag("mcast_flood", &BridgePortFlags::multicast_flood);
  flag("bcast_flood", &BridgePortFlags::broadcast_flood);
  flag("hairpin", &BridgePortFlags::hairpin);
  flag("guard", &BridgePortFlags::bpdu_guard);
  flag("proxy_arp", &BridgePortFlags::proxy_arp);
  flag("neigh_suppress", &BridgePortFlags::neigh_suppress);
  flag("fastleave", &BridgePortFlags::multicast_fast_leave);
  flag("mab", &BridgePortFlags::mab);
  differ(out, where + ", group_fwd_mask", std::to_string(expected.group_forward_mask),
         std::to_string(found.group_forward_mask));
}

// The host must not send redirects to, or take them from, a network of ours. Hardening on top of
// the gate, which drops them anyway: where /proc/sys is read-only nothing is lost.
void quiet_bridge(const InterfaceName& bridge) {
  const auto write = [&](const std::string& path, const char* value) {
    if (std::FILE* file = std::fopen(path.c_str(), "we")) {
      std::fputs(value, file);
      std::fclose(file);
    }
  };
  const std::string v4 = "/proc/sys/net/ipv4/conf/" + bridge.str() + "/";
  const std::string v6 = "/proc/sys/net/ipv6/conf/" + bridge.str() + "/";
  write(v4 + "send_redirects", "0");
  write(v4 + "accept_redirects", "0");
  write(v4 + "accept_source_route", "0");
  write(v4 + "proxy_arp", "0");
  write(v6 + "accept_ra", "0");
  write(v6 + "accept_redirects", "0");
}

Status first_of(std::vector<Error> errors, const std::string& operation) {
  if (errors.empty()) return {};
  Error error = errors.front();
  for (std::size_t i = 1; i < errors.size(); ++i) error.text += "; then " + errors[i].to_string();
  error.operation = operation + ": " + error.operation;
  return tl::unexpected(std::move(error));
}

PortSpec closed(PortSpec port) {
  port.policy.reset();
  return port;
}

}  // namespace

struct Gate::Impl {
  std::unique_ptr<Rtnl> rtnl;
  std::unique_ptr<nft::NftSocket> nft;
  KernelFeatures features;
  std::uint32_t table_flags = 0;
  // Policies whose objects are in the kernel, as this process put them there. Only a cache of what
  // need not be sent again; inspect_port reads the kernel.
  std::map<std::string, PolicySpec> installed;
  std::vector<Ipv4Range> host4;
  std::vector<Ipv6Range> host6;
  Result<UniqueFd> announcer = fail("open packet socket", "not tried");
  // Where the tables cannot outlive us, or others can take them away: what drops then.
  std::optional<Token> token;
  bool made_tables = false;                        // claim() found none
  std::map<InterfaceName, std::uint32_t> indexes;  // of bridges and ports, to know them again
  std::map<InterfaceName, NetworkSpec> networks;   // as created, for the sets that all share

  // Elements of the port that are in the kernel now, under whatever policy.
  Result<std::vector<Placed>> present_elements(const PortSpec& port) {
    std::vector<Placed> out;
    for (Placed& placed : ruleset::released_elements(port, "any")) {
      auto found = nft->find_element(placed.family, placed.set, placed.element.key);
      if (!found) return tl::unexpected(found.error());
      if (*found) out.push_back({placed.family, placed.set, std::move(**found)});
    }
    return out;
  }

  static void remove_elements(Batch& batch, const std::vector<Placed>& elements) {
    for (const Placed& placed : elements) {
      batch.delete_elements(placed.family, placed.set, {placed.element});
    }
  }

  // Puts `chain` in place of what the name has now.
  Status replace_chain(Batch& batch, const std::string& name, const Chain& chain) {
    auto found = nft->read_chain(Family::netdev, name);
    if (!found) return tl::unexpected(found.error());
    if (*found && (*found)->hook == chain.hook) {
      batch.flush_chain(Family::netdev, name);
      for (const nft::Rule& rule : chain.rules) batch.add_rule(Family::netdev, name, rule);
      return {};
    }
    if (*found) batch.delete_chain(Family::netdev, name);
    batch.add_whole(Family::netdev, name, chain);
    return {};
  }

  // Up to Linux 6.15 a chain goes with its device, follows it when it is renamed, and cannot be
  // made for one that is not there (ENOENT, and the batch is lost). A port without a link still
  // has to be closed: what is left of its chains is emptied.
  Status empty_port_chains(Batch& batch, const PortSpec& port) {
    const auto link = rtnl->link(port.name);
    if (link || link.error().code != ENODEV) return add_port_chains(batch, closed(port));
    for (const auto& [name, chain] :
         {std::pair{ruleset::ingress_chain(port.name), ruleset::ingress(closed(port))},
          std::pair{ruleset::egress_chain(port.name), ruleset::egress(closed(port))}}) {
      auto found = nft->read_chain(Family::netdev, name);
      if (!found) return tl::unexpected(found.error());
      if (!*found) continue;
      batch.flush_chain(Family::netdev, name);
      for (const nft::Rule& rule : chain.rules) batch.add_rule(Family::netdev, name, rule);
    }
    return {};
  }

  Status close(const PortSpec& port) {
    auto elements = present_elements(port);
    if (!elements) return tl::unexpected(elements.error());
    Batch batch;
    remove_elements(batch, *elements);
    Status status = empty_port_chains(batch, port);
    if (!status) return status;
    return nft->commit(batch, "close port " + port.name.str());
  }

  Status add_port_chains(Batch& batch, const PortSpec& port) {
    Status status = replace_chain(batch, ruleset::ingress_chain(port.name), ruleset::ingress(port));
    if (!status) return status;
    return replace_chain(batch, ruleset::egress_chain(port.name), ruleset::egress(port));
  }

  static void add_policy(Batch& batch, const PolicySpec& policy) {
    const auto objects = ruleset::policy(policy);
    for (const auto& [name, set] : objects.sets) batch.add_whole(Family::inet, name, set);
    for (const auto& [name, chain] : objects.chains) batch.add_whole(Family::inet, name, chain);
  }

  // From what is installed to what is wanted: only the difference, deletions first, so that boxes
  // that replace others do not overlap them.
  static void change_policy(Batch& batch, const PolicySpec& have, const PolicySpec& want) {
    const auto before = ruleset::policy(have);
    const auto after = ruleset::policy(want);
    std::vector<std::pair<std::string, std::vector<Element>>> additions;
    for (const auto& [name, set] : after.sets) {
      const auto& old = before.sets.at(name).elements;
      std::vector<Element> gone;
      std::vector<Element> come;
      std::set_difference(old.begin(), old.end(), set.elements.begin(), set.elements.end(),
                          std::back_inserter(gone));
      std::set_difference(set.elements.begin(), set.elements.end(), old.begin(), old.end(),
                          std::back_inserter(come));
      if (!gone.empty()) batch.delete_elements(Family::inet, name, gone);
      if (!come.empty()) additions.emplace_back(name, std::move(come));
    }
    for (const auto& [name, elements] : additions) {
      batch.add_elements(Family::inet, name, elements);
    }
    for (const auto& [name, chain] : after.chains) {
      if (chain == before.chains.at(name)) continue;
      batch.flush_chain(Family::inet, name);
      for (const nft::Rule& rule : chain.rules) batch.add_rule(Family::inet, name, rule);
    }
  }

  void install(Batch& batch, const PolicySpec& policy) {
    const auto known = installed.find(policy.name);
    if (known == installed.end()) {
      add_policy(batch, policy);
    } else if (!(known->second == policy)) {
      change_policy(batch, known->second, policy);
    }
  }

  Status remove_foreign_addresses(const NetworkSpec& network, std::uint32_t index) {
    auto addresses = rtnl->addresses();
    if (!addresses) return tl::unexpected(addresses.error());
    for (const LinkAddress& address : *addresses) {
      if (address.link != index) continue;
      const bool meant =
          address.address.is_v4()
              ? network.gateway4 && network.gateway4->address == address.address.v4() &&
                    network.gateway4->length == address.length
              : network.gateway6 && network.gateway6->address == address.address.v6() &&
                    network.gateway6->length == address.length;
      if (meant) continue;
      if (Status gone = rtnl->delete_address(address); !gone) return gone;
    }
    return {};
  }

  Status set_up_bridge(const NetworkSpec& network) {
    auto link = rtnl->link(network.bridge);
    if (!link && link.error().code != ENODEV) return tl::unexpected(link.error());
    // Renamed since rename_back() looked: a second bridge would leave the first behind.
    if (const auto index = indexes.find(network.bridge); !link && index != indexes.end()) {
      const auto renamed = rtnl->link(index->second);
      if (renamed && renamed->kind == "bridge") {
        if (Status back = rtnl->rename(renamed->index, network.bridge); !back) return back;
        link = rtnl->link(network.bridge);
        if (!link) return tl::unexpected(link.error());
      }
    }
    const bool known = link && indexes.count(network.bridge) != 0 &&
                       indexes.at(network.bridge) == link->index && link->kind == "bridge";
    if (link && !known &&
        (link->kind != "bridge" || link->group != kLinkGroup || link->mac != network.mac)) {
      return fail("create bridge " + network.bridge.str(),
                  "a link of that name exists and is not ours; remove it", EEXIST);
    }
    if (known && link->group != kLinkGroup) {
      if (Status grouped = rtnl->set_group(network.bridge, kLinkGroup); !grouped) return grouped;
    }
    if (known && link->mac != network.mac) {
      if (Status set = rtnl->set_mac(network.bridge, network.mac); !set) return set;
    }
    if (!link) {
      const Status made =
          rtnl->create_bridge({network.bridge, network.mac, network.mtu, kLinkGroup});
      if (!made) return made;
      link = rtnl->link(network.bridge);
      if (!link) return tl::unexpected(link.error());
    }
    indexes[network.bridge] = link->index;
    if (known) {
      if (Status set = rtnl->set_bridge_options(network.bridge); !set) return set;
      if (link->vlan_filtering.value_or(false)) {
        if (Status off = rtnl->no_vlan_filtering(network.bridge); !off) return off;
      }
      if (Status clean = remove_foreign_addresses(network, link->index); !clean) return clean;
    }
    const auto address = [&](const IpAddress& ip, std::uint8_t length) -> Status {
      Status added = rtnl->add_address(network.bridge, ip, length);
      if (!added && added.error().code == EEXIST) return {};
      return added;
    };
    if (network.gateway4) {
      const Status added = address(network.gateway4->address, network.gateway4->length);
      if (!added) return added;
    }
    if (network.gateway6) {
      const Status added = address(network.gateway6->address, network.gateway6->length);
      if (!added) return added;
    }
    quiet_bridge(network.bridge);
    if (token) {
      if (Status attached = token->attach(link->index); !attached) return attached;
    }
    return rtnl->set_up(network.bridge);
  }

  // The part of create_port that opens nothing and can be repeated on an existing link.
  Status set_up_port(const PortSpec& port) {
    auto link = rtnl->link(port.name);
    if (!link) return tl::unexpected(link.error());
    indexes[port.name] = link->index;
    auto bridge = rtnl->link(port.bridge);
    if (!bridge) return tl::unexpected(bridge.error());
    if (link->master != bridge->index) {
      // It is enslaved with the kernel's flags, and what is up without a master is routed from.
      if (link->up) {
        if (Status down = rtnl->set_down(port.name); !down) return down;
      }
      Status status = rtnl->enslave(port.name, port.bridge);
      if (!status) {
        if (status.error().code == ENOSPC) {
          status.error().text =
              "the network has all the ports a Linux bridge takes (1023); use another network";
        }
        return status;
      }
    }
    Status status = rtnl->set_port_flags(port.name, gate_flags());
    if (!status) return status;
    status = rtnl->set_up(port.name);
    if (!status) return status;
    auto after = rtnl->link(port.name);
    if (!after) return tl::unexpected(after.error());
    std::vector<Difference> differences;
    compare_flags("bridge port", gate_flags(), after->port.value_or(BridgePortFlags{}),
                  differences);
    if (!after->port || !differences.empty() || !after->up || after->master != bridge->index) {
      return fail("create port " + port.name.str(),
                  "the kernel did not take the bridge port's flags" +
                      (differences.empty() ? std::string() : ": " + differences.front().where),
                  EIO);
    }
    features.bridge_locked = true;
    return {};
  }

  Status controls(const PortSpec& port) {
    Status status = rtnl->set_port_flags(port.name, gate_flags());
    if (!status) return status;
    status = rtnl->set_fdb(port.name, port.mac);
    if (!status) return status;
    if (port.address4) {
      status = rtnl->set_neighbour(port.bridge, *port.address4, port.mac);
      if (!status) return status;
    }
    if (port.address6) {
      status = rtnl->set_neighbour(port.bridge, *port.address6, port.mac);
      if (!status) return status;
    }
    return {};
  }

  void remove_controls(const PortSpec& port, std::vector<Error>& errors) {
    const auto collect = [&](const Status& status) {
      if (!status && status.error().code != ENODEV) errors.push_back(status.error());
    };
    collect(rtnl->delete_fdb(port.name, port.mac));
    if (port.address4) collect(rtnl->delete_neighbour(port.bridge, *port.address4));
    if (port.address6) collect(rtnl->delete_neighbour(port.bridge, *port.address6));
  }

  // Link, flags, FDB entry and neighbours of a port.
  Result<std::vector<Difference>> link_differences(const InterfaceName& bridge_name,
                                                   const PortSpec& port) {
    std::vector<Difference> out;
    auto link = rtnl->link(port.name);
    if (!link && link.error().code != ENODEV) return tl::unexpected(link.error());
    auto bridge = rtnl->link(bridge_name);
    if (!bridge && bridge.error().code != ENODEV) return tl::unexpected(bridge.error());
    if (!link || !bridge) {
      out.push_back({"link " + (link ? bridge_name : port.name).str(), "present", ""});
    } else if (bridge->kind != "bridge") {
      out.push_back({"link " + bridge_name.str() + ", kind", "bridge", bridge->kind});
    } else {
      const std::string where = "port " + port.name.str();
      differ(out, where + ", kind", "veth", link->kind);
      differ(out, where + ", group", std::to_string(kLinkGroup), std::to_string(link->group));
      differ(out, where + ", up", true, link->up);
      differ(out, where + ", master", std::to_string(bridge->index), std::to_string(link->master));
      differ(out, where + ", addrgenmode", std::to_string(kAddrGenNone),
             std::to_string(link->addrgen_mode));
      compare_flags(where, gate_flags(), link->port.value_or(BridgePortFlags{}), out);
      // Without a carrier (the container's end is not up yet) the kernel disables the port.
      const std::uint8_t state = link->port_state.value_or(kForwarding);
      if (state != kForwarding && state != 0) {
        out.push_back({where + ", state", "forwarding", std::to_string(state)});
      }
      auto fdb = rtnl->find_fdb(bridge->index, port.mac);
      if (!fdb) return tl::unexpected(fdb.error());
      const std::string fdb_found = !*fdb ? ""
                                          : std::string((*fdb)->is_static ? "static" : "dynamic") +
                                                " on " + std::to_string((*fdb)->port);
      differ(out, "FDB entry " + port.mac.to_string(),
             port.prepared ? "static on " + std::to_string(link->index) : "", fdb_found);
      const auto neighbour = [&](const IpAddress& address) -> Status {
        auto found = rtnl->find_neighbour(bridge->index, address);
        if (!found) return tl::unexpected(found.error());
        std::string text;
        if (*found) {
          text =
              (*found)->mac.to_string() + ((*found)->permanent ? " permanent" : " not permanent");
        }
        // A learnt entry of an unprepared port is the host's own attempt to reach it, and harmless.
        if (!port.prepared && *found && !(*found)->permanent) text.clear();
        differ(out, "neighbour " + address.to_string(),
               port.prepared ? port.mac.to_string() + " permanent" : "", text);
        return {};
      };
      if (port.address4) {
        if (const Status status = neighbour(*port.address4); !status) {
          return tl::unexpected(status.error());
        }
      }
      if (port.address6) {
        if (const Status status = neighbour(*port.address6); !status) {
          return tl::unexpected(status.error());
        }
      }
    }
    return out;
  }

  // Bridge device and its addresses.
  Result<std::vector<Difference>> bridge_differences(const NetworkSpec& network) {
    std::vector<Difference> out;
    auto bridge = rtnl->link(network.bridge);
    if (!bridge && bridge.error().code != ENODEV) return tl::unexpected(bridge.error());
    const std::string where = "bridge " + network.bridge.str();
    if (!bridge) {
      out.push_back({where, "present", ""});
    } else {
      differ(out, where + ", kind", "bridge", bridge->kind);
      differ(out, where + ", MAC", network.mac.to_string(), bridge->mac.to_string());
      differ(out, where + ", group", std::to_string(kLinkGroup), std::to_string(bridge->group));
      differ(out, where + ", up", true, bridge->up);
      differ(out, where + ", master", "0", std::to_string(bridge->master));
      differ(out, where + ", stp", false, bridge->stp.value_or(false));
      differ(out, where + ", vlan_filtering", false, bridge->vlan_filtering.value_or(false));
      differ(out, where + ", mcast_snooping", false, bridge->multicast_snooping.value_or(false));
      differ(out, where + ", group_fwd_mask", "0",
             std::to_string(bridge->group_forward_mask.value_or(0)));
      if (token) {
        const auto present = token->present(bridge->index);
        if (!present) return tl::unexpected(present.error());
        if (!*present) out.push_back({where + ", token", "attached both ways", ""});
      }
      auto addresses = rtnl->addresses();
      if (!addresses) return tl::unexpected(addresses.error());
      std::vector<LinkAddress> expected;
      if (network.gateway4) {
        expected.push_back({bridge->index, network.gateway4->address, network.gateway4->length});
      }
      if (network.gateway6) {
        expected.push_back({bridge->index, network.gateway6->address, network.gateway6->length});
      }
      const auto text = [](const LinkAddress& a) {
        return a.address.to_string() + "/" + std::to_string(a.length);
      };
      for (const LinkAddress& address : expected) {
        if (std::find(addresses->begin(), addresses->end(), address) == addresses->end()) {
          out.push_back({where + ", address", text(address), ""});
        }
      }
      for (const LinkAddress& address : *addresses) {
        if (address.link == bridge->index &&
            std::find(expected.begin(), expected.end(), address) == expected.end()) {
          out.push_back({where + ", address", "", text(address)});
        }
      }
    }
    return out;
  }

  // Layers 1, 2 (table) and 3 of a port against what `port.policy` says; nothing of the link.
  Result<std::vector<Difference>> compare_tables(const PortSpec& port, const PolicySpec* policy) {
    std::vector<Difference> out;
    const std::pair<std::string, Chain> chains[] = {
        {ruleset::ingress_chain(port.name), ruleset::ingress(port)},
        {ruleset::egress_chain(port.name), ruleset::egress(port)}};
    for (const auto& [name, expected] : chains) {
      auto found = nft->read_chain(Family::netdev, name);
      if (!found) return tl::unexpected(found.error());
      const std::string where = "layer 1, chain " + name;
      if (!*found) {
        out.push_back({where, "present", ""});
      } else {
        nft::compare(where, expected, **found, out);
      }
    }
    auto present = present_elements(port);
    if (!present) return tl::unexpected(present.error());
    std::vector<Placed> expected;
    if (port.policy) expected = ruleset::released_elements(port, *port.policy);
    for (const Placed& placed : expected) {
      if (std::find(present->begin(), present->end(), placed) == present->end()) {
        out.push_back(
            {(placed.family == Family::bridge ? "layer 2, set " : "layer 3, map ") + placed.set,
             nft::to_string(placed.element), ""});
      }
    }
    for (const Placed& placed : *present) {
      if (std::find(expected.begin(), expected.end(), placed) == expected.end()) {
        out.push_back(
            {(placed.family == Family::bridge ? "layer 2, set " : "layer 3, map ") + placed.set, "",
             nft::to_string(placed.element)});
      }
    }
    if (port.policy && policy != nullptr) {
      const auto objects = ruleset::policy(*policy);
      for (const auto& [name, set] : objects.sets) {
        auto found = nft->read_set(Family::inet, name);
        if (!found) return tl::unexpected(found.error());
        if (!*found) {
          out.push_back({"layer 3, set " + name, "present", ""});
        } else {
          nft::compare("layer 3, set " + name, set, **found, out);
        }
      }
      for (const auto& [name, chain] : objects.chains) {
        auto found = nft->read_chain(Family::inet, name);
        if (!found) return tl::unexpected(found.error());
        if (!*found) {
          out.push_back({"layer 3, chain " + name, "present", ""});
        } else {
          nft::compare("layer 3, chain " + name, chain, **found, out);
        }
      }
    }
    return out;
  }

  Result<nft::Ruleset> read_tables() {
    nft::Ruleset out;
    for (const Family family : kFamilies) {
      auto table = nft->read_table(family);
      if (!table) return tl::unexpected(table.error());
      if (*table) out[family] = std::move(**table);
    }
    return out;
  }

  // One transaction from whatever is there to what shall be: no moment without it.
  Status write_tables(const nft::Ruleset& have, const GateSpec& want) {
    const nft::Ruleset rendered = ruleset::render(want, table_flags);
    Batch batch;
    // In this order, layer 1 first: tables that end with their owner end in the order they were
    // made (nft_rcv_nl_event), and without the port mark nothing passes the token any more.
    for (const Family family : kFamilies) {
      const nft::Table& table = rendered.at(family);
      // NEWTABLE creates it where it is absent, so that DELTABLE always finds one.
      const auto found = have.find(family);
      batch.add_table(family, found == have.end() ? table.flags : found->second.flags);
      batch.delete_table(family);
      batch.add_table(family, table.flags);
      for (const auto& [name, set] : table.sets) batch.add_set(family, name, set);
      for (const auto& [name, chain] : table.chains) batch.add_chain(family, name, chain);
      for (const auto& [name, chain] : table.chains) {
        for (const nft::Rule& rule : chain.rules) batch.add_rule(family, name, rule);
      }
      for (const auto& [name, set] : table.sets) batch.add_elements(family, name, set.elements);
    }
    return nft->commit(batch, "restore the tables");
  }

  void remember(const GateSpec& want) {
    installed = want.policies;
    host4 = want.host4;
    host6 = want.host6;
    networks = want.networks;
  }

  // Links that carry our group and a name like ours, and are not in `want`. Ports come first: one
  // that is up and loses its bridge is routed from.
  static std::vector<Link> strangers(const std::vector<Link>& links, const GateSpec& want) {
    std::vector<Link> out;
    for (const Link& link : links) {
      const std::string& name = link.name.str();
      if (link.group != kLinkGroup ||
          (name.rfind(kPortPrefix, 0) != 0 && name.rfind(kBridgePrefix, 0) != 0)) {
        continue;
      }
      if (want.ports.count(link.name) == 0 && want.networks.count(link.name) == 0) {
        out.push_back(link);
      }
    }
    std::stable_partition(out.begin(), out.end(), [](const Link& link) {
      return link.name.str().rfind(kPortPrefix, 0) == 0;
    });
    return out;
  }

  // Gives renamed links their names back; they are DOWN then. Returns the links as they are after.
  Result<std::vector<Link>> rename_back(const GateSpec& want) {
    auto links = rtnl->links();
    if (!links) return links;
    bool renamed = false;
    const auto look = [&](const InterfaceName& name, const char* kind) -> Status {
      const bool there = std::any_of(links->begin(), links->end(),
                                     [&](const Link& link) { return link.name == name; });
      const auto index = indexes.find(name);
      if (there || index == indexes.end()) return {};
      for (const Link& link : *links) {
        if (link.index != index->second || link.kind != kind) continue;
        renamed = true;
        // One that cannot be had back is taken away, before anybody calls it gone.
        const Status back = rtnl->rename(link.index, name);
        return back ? back : rtnl->delete_link(link.name);
      }
      return {};
    };
    for (const auto& [name, network] : want.networks) {
      if (Status status = look(name, "bridge"); !status) return tl::unexpected(status.error());
    }
    for (const auto& [name, port] : want.ports) {
      if (Status status = look(name, "veth"); !status) return tl::unexpected(status.error());
    }
    return renamed ? rtnl->links() : links;
  }

  Status tables_to(const GateSpec& want) {
    auto have = read_tables();
    if (!have) return tl::unexpected(have.error());
    if (*have == ruleset::render(want, table_flags)) return {};
    if (Status written = write_tables(*have, want); !written) return written;
    remember(want);
    return {};
  }

  // `want` with every port closed whose link, controls or bridge are not as meant: nothing is
  // released before what it stands on is right.
  Result<GateSpec> as_far_as_links_are_right(const GateSpec& want) {
    GateSpec out = want;
    std::set<InterfaceName> wrong;
    for (const auto& [name, network] : want.networks) {
      auto found = bridge_differences(network);
      if (!found) return tl::unexpected(found.error());
      if (!found->empty()) wrong.insert(name);
    }
    for (auto& [name, port] : out.ports) {
      auto found = link_differences(port.bridge, port);
      if (!found) return tl::unexpected(found.error());
      if (!found->empty() || wrong.count(port.bridge) != 0) port.policy.reset();
    }
    return out;
  }

  // One attempt. A port whose link is gone leaves `want`.
  Status put_back(GateSpec& want, Repaired& out, std::vector<Error>& errors) {
    const auto collect = [&](const Status& status) {
      if (!status) errors.push_back(status.error());
    };
    auto links = rename_back(want);
    if (!links) return tl::unexpected(links.error());
    // Before 6.16 a batch with a chain for a device that is not there is refused as a whole.
    for (auto port = want.ports.begin(); port != want.ports.end();) {
      const bool there = std::any_of(links->begin(), links->end(),
                                     [&](const Link& link) { return link.name == port->first; });
      if (there) {
        ++port;
        continue;
      }
      out.gone.push_back(port->first);
      port = want.ports.erase(port);
    }
    auto have = read_tables();
    if (!have) return tl::unexpected(have.error());
    if (*have != ruleset::render(want, table_flags)) {
      auto safe = as_far_as_links_are_right(want);
      if (!safe) return tl::unexpected(safe.error());
      collect(tables_to(*safe));
    }
    for (const Link& link : strangers(*links, want)) collect(rtnl->delete_link(link.name));
    for (const auto& [name, network] : want.networks) collect(set_up_bridge(network));
    auto foreign = foreign_entries(want);
    if (!foreign) return tl::unexpected(foreign.error());
    std::set<InterfaceName> wrong;
    for (const auto& [name, mac] : *foreign) wrong.insert(name);
    for (const auto& [name, port] : want.ports) {
      auto found = link_differences(port.bridge, port);
      if (!found) return tl::unexpected(found.error());
      if (!found->empty() || wrong.count(name) != 0) collect(repair_port(port));
    }
    collect(tables_to(want));
    return {};
  }

  // Without VLAN filtering the entries of VLAN 0 count; the others are their doubles.
  static bool is_foreign(const FdbEntry& entry, const PortSpec& port) {
    return entry.vlan == 0 && !entry.permanent && entry.mac != port.mac;
  }
  static Difference foreign_entry(const PortSpec& port, const MacAddress& mac) {
    return {"port " + port.name.str() + ", FDB", "", mac.to_string()};
  }
  // FDB entries on ports of ours that are not the port's own.
  Result<std::vector<std::pair<InterfaceName, MacAddress>>> foreign_entries(const GateSpec& want) {
    std::map<std::uint32_t, const PortSpec*> by_index;
    for (const auto& [name, port] : want.ports) {
      const auto index = indexes.find(name);
      if (index != indexes.end()) by_index[index->second] = &port;
    }
    std::vector<std::pair<InterfaceName, MacAddress>> out;
    for (const auto& [name, network] : want.networks) {
      const auto bridge = rtnl->link(name);
      if (!bridge && bridge.error().code != ENODEV) return tl::unexpected(bridge.error());
      if (!bridge || bridge->kind != "bridge") continue;  // that is a difference by itself
      auto entries = rtnl->fdb(bridge->index);
      if (!entries) return tl::unexpected(entries.error());
      for (const FdbEntry& entry : *entries) {
        const auto port = by_index.find(entry.port);
        if (port == by_index.end() || !is_foreign(entry, *port->second)) continue;
        out.emplace_back(port->second->name, entry.mac);
      }
    }
    return out;
  }

  Status repair_port(const PortSpec& port) {
    auto link = rtnl->link(port.name);
    if (!link) return tl::unexpected(link.error());
    auto bridge = rtnl->link(port.bridge);
    if (!bridge) return tl::unexpected(bridge.error());
    if (link->group != kLinkGroup) {
      if (Status grouped = rtnl->set_group(port.name, kLinkGroup); !grouped) return grouped;
    }
    auto entries = rtnl->fdb(bridge->index);
    if (!entries) return tl::unexpected(entries.error());
    for (const FdbEntry& entry : *entries) {
      const bool meant = port.prepared && entry.mac == port.mac && entry.is_static;
      if (entry.port != link->index || entry.permanent || meant) continue;
      if (Status gone = rtnl->delete_fdb(port.name, entry.mac); !gone) return gone;
    }
    if (Status up = set_up_port(port); !up) return up;
    if (port.prepared) return controls(port);
    std::vector<Error> errors;
    remove_controls(port, errors);
    return first_of(std::move(errors), "repair port " + port.name.str());
  }

  // The last resort needs no firewall and nobody but the host's root undoes it.
  void shut(const PortSpec& port, Repaired& out) {
    if (const Status down = rtnl->set_down(port.name); !down && down.error().code != ENODEV) {
      out.left.push_back({"port " + port.name.str(), "DOWN", down.error().to_string()});
    }
    out.closed.push_back(port.name);
  }

  Status read_back_closed(const PortSpec& port) {
    auto differences = compare_tables(closed(port), nullptr);
    if (!differences) return tl::unexpected(differences.error());
    const auto link = rtnl->link(port.name);
    if (!link && link.error().code == ENODEV) {
      // Up to Linux 6.15, as in empty_port_chains.
      const auto of_the_link = [](const Difference& d) {
        const bool chain = d.where.rfind("layer 1, chain ", 0) == 0;
        return chain && (d.expected == "present" || d.where.ends_with(", hook"));
      };
      differences->erase(std::remove_if(differences->begin(), differences->end(), of_the_link),
                         differences->end());
    }
    if (differences->empty()) return {};
    const Difference& first = differences->front();
    return fail("close port " + port.name.str(),
                "read back differs: " + first.where + ": expected '" + first.expected +
                    "', found '" + first.found + "'",
                EIO);
  }

  Status probe(Ownership ownership) {
    // Validated and thrown away; family ip, since a table of ours may exist in the others.
    Batch persist;
    persist.add_table(Family::ip, kTableOwner | kTablePersist);
    features.owner_persist = nft->dry_run(persist, "probe").has_value();
    Batch owner;
    owner.add_table(Family::ip, kTableOwner);
    features.owner = nft->dry_run(owner, "probe").has_value();
    Batch plain;
    plain.add_table(Family::ip, 0);
    if (const Status status = nft->dry_run(plain, "probe nftables"); !status) return status;
    if (!features.owner) {
      return fail("probe the kernel", "no owner flag of nftables tables (needs Linux 5.12)",
                  EOPNOTSUPP);
    }
    table_flags = kTableOwner;
    if (features.owner_persist && ownership == Ownership::best) table_flags |= kTablePersist;
    if (ownership == Ownership::none) table_flags = 0;
    return {};
  }

  Status claim() {
    Batch batch;
    made_tables = true;
    for (const Family family : kFamilies) {
      const auto flags = nft->table_flags(family);
      if (!flags) return tl::unexpected(flags.error());
      if (*flags) made_tables = false;
      // The kernel takes the owner flag off a table whose owner is gone (nft_rcv_nl_event), so an
      // orphan shows persist alone. A table with other flags is another version's, or a kernel's
      // that could less; restore() replaces it.
      const bool orphan = *flags && table_flags != 0 && **flags == (table_flags & kTablePersist);
      if (!*flags || orphan || **flags == table_flags) batch.add_table(family, table_flags);
    }
    Status status = nft->commit(batch, "claim the tables");
    if (!status && status.error().code == EPERM) {
      status.error().text = "another process owns them: is a second agentgated running here?";
    }
    if (!status) return status;
    Batch egress;
    Chain chain;
    chain.hook = nft::Hook{"filter", 1 /* NF_NETDEV_EGRESS */, 0, NF_ACCEPT, "lo"};
    egress.add_chain(Family::netdev, "probe", chain);
    features.netdev_egress = nft->dry_run(egress, "probe").has_value();
    if (!features.netdev_egress) {
      return fail("probe the kernel",
                  "no netdev egress hook (needs Linux 5.16, CONFIG_NETFILTER_EGRESS)", EOPNOTSUPP);
    }
    return {};
  }
};

Gate::Gate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Gate::~Gate() = default;

Result<std::unique_ptr<Gate>> Gate::open(Ownership ownership) {
  auto impl = std::make_unique<Impl>();
  auto rtnl = Rtnl::open();
  if (!rtnl) return tl::unexpected(rtnl.error());
  impl->rtnl = std::move(*rtnl);
  auto nft = nft::NftSocket::open();
  if (!nft) return tl::unexpected(nft.error());
  impl->nft = std::move(*nft);
  if (const Status status = impl->probe(ownership); !status) return tl::unexpected(status.error());
  if ((impl->table_flags & kTablePersist) == 0) {
    auto token = Token::open();
    if (!token) {
      token.error().text =
          "without nftables' owner,persist (Linux 6.9) this is needed: " + token.error().text;
      return tl::unexpected(token.error());
    }
    impl->token = std::move(*token);
  }
  impl->announcer = open_announcer();  // without it nothing is announced, and the report says so
  if (const Status status = impl->claim(); !status) return tl::unexpected(status.error());
  return std::unique_ptr<Gate>(new Gate(std::move(impl)));
}

const KernelFeatures& Gate::features() const { return impl_->features; }

Result<Restored> Gate::restore(const GateSpec& wanted) {
  GateSpec want = wanted;
  Restored result;

  auto links = impl_->rtnl->links();
  if (!links) return tl::unexpected(links.error());
  const auto has_link = [&](const InterfaceName& name) {
    return std::any_of(links->begin(), links->end(),
                       [&](const Link& link) { return link.name == name; });
  };
  std::vector<Error> errors;
  for (const Link& link : Impl::strangers(*links, want)) {
    if (const Status gone = impl_->rtnl->delete_link(link.name); !gone) {
      errors.push_back(gone.error());
    } else {
      result.removed.push_back(link.name);
    }
  }
  if (const Status status = first_of(std::move(errors), "remove what is not known"); !status) {
    return tl::unexpected(status.error());
  }
  for (const auto& [name, network] : want.networks) {
    if (const Status status = impl_->set_up_bridge(network); !status) {
      return tl::unexpected(status.error());
    }
  }

  // A port without its link is gone for good: its rules go, its owner is told.
  for (auto port = want.ports.begin(); port != want.ports.end();) {
    if (has_link(port->first)) {
      ++port;
    } else {
      result.closed.push_back(port->first);
      port = want.ports.erase(port);
    }
  }

  auto read = impl_->read_tables();
  if (!read) return tl::unexpected(read.error());
  const nft::Ruleset have = std::move(*read);
  // Without `persist` the tables went with the process that owned them, and the token held what it
  // had released. Then the links and their controls say whether a port is as it was left.
  const bool went_with_owner = tables_went_with_owner();
  impl_->made_tables = false;
  if (have != ruleset::render(want, impl_->table_flags)) {
    // Which released ports does the kernel have exactly so? The others are closed.
    for (auto& [name, port] : want.ports) {
      if (!port.policy) continue;
      const auto policy = want.policies.find(*port.policy);
      bool good = policy != want.policies.end();
      if (good && went_with_owner) {
        const auto differences = impl_->link_differences(port.bridge, port);
        if (!differences) return tl::unexpected(differences.error());
        good = differences->empty();
      } else if (good) {
        const auto differences = impl_->compare_tables(port, &policy->second);
        if (!differences && differences.error().code != ENOENT) {
          return tl::unexpected(differences.error());
        }
        good = differences && differences->empty();
      }
      if (good) continue;
      port.policy.reset();
      result.closed.push_back(name);
    }
    // Policies that no port is released to are not installed.
    for (auto policy = want.policies.begin(); policy != want.policies.end();) {
      const bool used = std::any_of(want.ports.begin(), want.ports.end(), [&](const auto& entry) {
        return entry.second.policy == policy->first;
      });
      policy = used ? std::next(policy) : want.policies.erase(policy);
    }
    if (const Status status = impl_->write_tables(have, want); !status) {
      return tl::unexpected(status.error());
    }
  }
  impl_->remember(want);

  for (const auto& [name, port] : want.ports) {
    if (const Status status = impl_->set_up_port(port); !status) {
      return tl::unexpected(status.error());
    }
    if (!port.prepared) {
      // What an arm had put in place when the daemon died would weaken `locked`.
      std::vector<Error> left;
      impl_->remove_controls(port, left);
      if (const Status gone = first_of(std::move(left), "restore"); !gone) {
        return tl::unexpected(gone.error());
      }
      continue;
    }
    if (const Status status = impl_->controls(port); !status) {
      return tl::unexpected(status.error());
    }
  }
  return result;
}

Result<std::vector<Difference>> Gate::inspect_link(const PortSpec& port) {
  return impl_->link_differences(port.bridge, port);
}

Result<std::vector<Difference>> Gate::inspect_bridge(const NetworkSpec& network) {
  return impl_->bridge_differences(network);
}

Result<bool> Gate::has_link(const InterfaceName& name) {
  const auto link = impl_->rtnl->link(name);
  if (!link && link.error().code != ENODEV) return tl::unexpected(link.error());
  return link.has_value();
}

bool Gate::tables_went_with_owner() const {
  return impl_->made_tables && impl_->token.has_value() && impl_->table_flags == kTableOwner;
}

std::uint32_t Gate::nft_portid() const { return impl_->nft->portid(); }

Result<Survey> Gate::survey(const GateSpec& want) {
  Survey out;
  const auto add = [&](std::vector<Difference> found) {
    out.differences.insert(out.differences.end(), found.begin(), found.end());
    return !found.empty();
  };
  for (const auto& [name, network] : want.networks) {
    auto found = impl_->bridge_differences(network);
    if (!found) return tl::unexpected(found.error());
    if (add(std::move(*found))) out.bridges.insert(name);
  }
  auto foreign = impl_->foreign_entries(want);
  if (!foreign) return tl::unexpected(foreign.error());
  for (const auto& [name, mac] : *foreign) {
    out.differences.push_back(Impl::foreign_entry(want.ports.at(name), mac));
    out.ports.insert(name);
  }
  for (const auto& [name, port] : want.ports) {
    auto found = impl_->link_differences(port.bridge, port);
    if (!found) return tl::unexpected(found.error());
    if (add(std::move(*found))) out.ports.insert(name);
  }
  auto links = impl_->rtnl->links();
  if (!links) return tl::unexpected(links.error());
  for (const Link& link : Impl::strangers(*links, want)) {
    out.differences.push_back({"link " + link.name.str() + " of our group", "", "present"});
  }
  auto have = impl_->read_tables();
  if (!have) return tl::unexpected(have.error());
  for (const auto& [family, table] : ruleset::render(want, impl_->table_flags)) {
    std::vector<Difference> found;
    const auto there = have->find(family);
    if (there == have->end()) {
      found.push_back({table_place(family), "present", ""});
    } else {
      nft::compare(table_place(family), table, there->second, found);
    }
    if (add(std::move(found))) out.tables = true;
  }
  return out;
}

Result<Repaired> Gate::repair(const GateSpec& wanted) {
  GateSpec want = wanted;
  Repaired out;
  // Whoever changes things may still be at it.
  for (int attempt = 1; attempt <= kRepairAttempts; ++attempt) {
    std::vector<Error> errors;
    if (const Status done = impl_->put_back(want, out, errors); !done) {
      errors.push_back(done.error());
    }
    auto seen = survey(want);
    if (seen && seen->empty()) return out;
    if (attempt < kRepairAttempts) continue;
    if (!seen) errors.push_back(seen.error());
    for (const Error& error : errors) out.left.push_back({"repair", "", error.to_string()});
    if (seen) {
      out.left.insert(out.left.end(), seen->differences.begin(), seen->differences.end());
    }
    // What cannot be seen, or stands on tables or a bridge that are not right, cannot be proved.
    for (const auto& [name, port] : want.ports) {
      if (!seen || seen->tables || seen->ports.count(name) != 0 ||
          seen->bridges.count(port.bridge) != 0) {
        impl_->shut(port, out);
      }
    }
  }
  return out;
}

Status Gate::create_network(const NetworkSpec& network) {
  const auto undo = [&] { (void)impl_->rtnl->delete_link(network.bridge); };
  auto before = impl_->rtnl->link(network.bridge);
  Status status = impl_->set_up_bridge(network);
  if (!status) {
    if (!before && status.error().code != EEXIST) undo();
    return status;
  }
  Batch batch;
  for (const Placed& placed : ruleset::network_elements(network)) {
    batch.add_elements(placed.family, placed.set, {placed.element});
  }
  status = impl_->nft->commit(batch, "create network " + network.bridge.str());
  if (!status && !before) undo();
  if (status) impl_->networks[network.bridge] = network;
  return status;
}

Status Gate::delete_network(const InterfaceName& bridge) {
  auto link = impl_->rtnl->link(bridge);
  if (!link && link.error().code != ENODEV) return tl::unexpected(link.error());
  if (link) {
    auto links = impl_->rtnl->links();
    if (!links) return tl::unexpected(links.error());
    for (const Link& port : *links) {
      if (port.master == link->index) {
        return fail("delete network " + bridge.str(), "port " + port.name.str() + " is still on it",
                    EBUSY);
      }
    }
  }
  std::vector<Error> errors;
  if (const Status gone = impl_->rtnl->delete_link(bridge); !gone) errors.push_back(gone.error());
  impl_->indexes.erase(bridge);
  const auto known = impl_->networks.find(bridge);
  if (known == impl_->networks.end()) {
    return first_of(std::move(errors), "delete network " + bridge.str());
  }
  Batch batch;
  for (const Placed& placed : ruleset::network_elements(known->second)) {
    auto set = impl_->nft->read_set(placed.family, placed.set);
    if (!set) {
      errors.push_back(set.error());
    } else if (*set) {
      const auto& have = (*set)->elements;
      if (std::find(have.begin(), have.end(), placed.element) != have.end()) {
        batch.delete_elements(placed.family, placed.set, {placed.element});
      }
    }
  }
  if (const Status gone = impl_->nft->commit(batch, "remove pool"); !gone) {
    errors.push_back(gone.error());
  } else {
    impl_->networks.erase(known);
  }
  return first_of(std::move(errors), "delete network " + bridge.str());
}

Status Gate::create_port(const PortSpec& wanted) {
  const PortSpec port = closed(wanted);
  Status status = impl_->rtnl->create_veth({port.name, port.peer, port.mac, port.mtu, kLinkGroup});
  if (!status) return status;
  // The link is DOWN and has no master: nothing passes yet, and from here on nothing may.
  Batch batch;
  auto stale = impl_->present_elements(port);
  if (!stale) {
    status = tl::unexpected(stale.error());
  } else {
    Impl::remove_elements(batch, *stale);
    status = impl_->add_port_chains(batch, port);
  }
  if (status) status = impl_->nft->commit(batch, "close port " + port.name.str());
  if (status) status = impl_->read_back_closed(port);
  if (status) status = impl_->set_up_port(port);
  if (!status) (void)delete_port(port);
  return status;
}

Status Gate::delete_port(const PortSpec& port) {
  std::vector<Error> errors;
  const auto collect = [&](const Status& status) {
    if (!status) errors.push_back(status.error());
  };
  // First the elements: a new port of the same address must not find them. Then the link, then
  // its chains: a link that lost its chains is open.
  auto elements = impl_->present_elements(port);
  if (!elements) {
    errors.push_back(elements.error());
  } else {
    Batch batch;
    Impl::remove_elements(batch, *elements);
    collect(impl_->nft->commit(batch, "close port " + port.name.str()));
  }
  impl_->remove_controls(port, errors);
  const Status gone = impl_->rtnl->delete_link(port.name);
  collect(gone);
  if (gone) impl_->indexes.erase(port.name);
  if (gone) {
    Batch batch;
    for (const std::string& name :
         {ruleset::ingress_chain(port.name), ruleset::egress_chain(port.name)}) {
      // Up to Linux 6.15 the chains went with the device.
      auto chain = impl_->nft->read_chain(Family::netdev, name);
      if (!chain) errors.push_back(chain.error());
      if (chain && *chain) batch.delete_chain(Family::netdev, name);
    }
    collect(impl_->nft->commit(batch, "remove chains of " + port.name.str()));
  }
  return first_of(std::move(errors), "delete port " + port.name.str());
}

Status Gate::close_port(const PortSpec& wanted) {
  const PortSpec port = closed(wanted);
  // ENOENT: the link (and up to Linux 6.15 its chains) went away in between.
  Status status = impl_->close(port);
  if (!status && status.error().code == ENOENT) status = impl_->close(port);
  if (!status) return status;
  return impl_->read_back_closed(port);
}

Status Gate::prepare_port(const PortSpec& port) { return impl_->controls(port); }

Status Gate::unprepare_port(const PortSpec& port) {
  std::vector<Error> errors;
  impl_->remove_controls(port, errors);
  return first_of(std::move(errors), "remove controls of " + port.name.str());
}

Status Gate::release_port(const PortSpec& port, const PolicySpec& policy) {
  if (!port.policy || *port.policy != policy.name) {
    return fail("release port " + port.name.str(), "port and policy do not belong together",
                EINVAL);
  }
  Batch batch;
  impl_->install(batch, policy);
  auto stale = impl_->present_elements(port);
  if (!stale) return tl::unexpected(stale.error());
  Impl::remove_elements(batch, *stale);
  Status status = impl_->add_port_chains(batch, port);
  if (!status) return status;
  for (const Placed& placed : ruleset::released_elements(port, policy.name)) {
    batch.add_elements(placed.family, placed.set, {placed.element});
  }
  status = impl_->nft->commit(batch, "release port " + port.name.str());
  if (status) impl_->installed[policy.name] = policy;
  return status;
}

Status Gate::announce(const PortSpec& port) {
  if (!impl_->announcer) return tl::unexpected(impl_->announcer.error());
  const auto bridge = impl_->rtnl->link(port.bridge);
  if (!bridge) return tl::unexpected(bridge.error());
  return announce_gateway(impl_->announcer->get(), bridge->index, port);
}

Status Gate::update_policy(const PolicySpec& policy) {
  const auto known = impl_->installed.find(policy.name);
  if (known == impl_->installed.end() || known->second == policy) return {};
  Batch batch;
  Impl::change_policy(batch, known->second, policy);
  Status status = impl_->nft->commit(batch, "update policy " + policy.name);
  if (status) known->second = policy;
  return status;
}

Status Gate::delete_policy(const std::string& name) {
  const auto known = impl_->installed.find(name);
  if (known == impl_->installed.end()) return {};
  const auto objects = ruleset::policy(known->second);
  Batch batch;
  for (const auto& [chain, value] : objects.chains) batch.delete_chain(Family::inet, chain);
  for (const auto& [set, value] : objects.sets) batch.delete_set(Family::inet, set);
  Status status = impl_->nft->commit(batch, "delete policy " + name);
  if (status) impl_->installed.erase(known);
  return status;
}

Status Gate::set_host_addresses(const std::vector<Ipv4Range>& v4,
                                const std::vector<Ipv6Range>& v6) {
  Batch batch;
  const auto replace = [&](const char* set, const std::vector<Element>& have,
                           const std::vector<Element>& want) {
    if (have == want) return;
    batch.delete_elements(Family::inet, set, have);
    batch.add_elements(Family::inet, set, want);
  };
  replace(ruleset::kHostSet4, ruleset::intervals(impl_->host4), ruleset::intervals(v4));
  replace(ruleset::kHostSet6, ruleset::intervals(impl_->host6), ruleset::intervals(v6));
  Status status = impl_->nft->commit(batch, "set host addresses");
  if (status) {
    impl_->host4 = v4;
    impl_->host6 = v6;
  }
  return status;
}

Result<PortReport> Gate::inspect_port(const NetworkSpec& network, const PortSpec& port,
                                      const PolicySpec* policy) {
  PortReport report;
  auto seen = impl_->link_differences(network.bridge, port);
  if (!seen) return tl::unexpected(seen.error());
  std::vector<Difference> link_differences = std::move(*seen);

  auto table_differences = impl_->compare_tables(port, policy);
  if (!table_differences) return tl::unexpected(table_differences.error());
  if (link_differences.empty() && table_differences->empty()) {
    report.state = port.policy ? PortState::released : PortState::closed;
    return report;
  }
  if (port.policy && link_differences.empty()) {
    auto as_closed = impl_->compare_tables(closed(port), nullptr);
    if (!as_closed) return tl::unexpected(as_closed.error());
    if (as_closed->empty()) return report;
  }
  report.state = PortState::inconsistent;
  report.differences = std::move(link_differences);
  report.differences.insert(report.differences.end(), table_differences->begin(),
                            table_differences->end());
  return report;
}

Result<std::vector<Difference>> Gate::foreign_entries(const PortSpec& port) {
  std::vector<Difference> out;
  const auto bridge = impl_->rtnl->link(port.bridge);
  const auto link = impl_->rtnl->link(port.name);
  if (!bridge || !link || link->master != bridge->index) return out;
  auto entries = impl_->rtnl->fdb(bridge->index, link->index);
  if (!entries) return tl::unexpected(entries.error());
  for (const FdbEntry& entry : *entries) {
    if (Impl::is_foreign(entry, port)) out.push_back(Impl::foreign_entry(port, entry.mac));
  }
  return out;
}

Result<std::vector<Difference>> Gate::inspect_network(const NetworkSpec& network) {
  auto seen = impl_->bridge_differences(network);
  if (!seen) return tl::unexpected(seen.error());
  std::vector<Difference> out = std::move(*seen);
  for (const Family family : kFamilies) {
    const nft::Table expected = ruleset::skeleton(family, impl_->table_flags);
    const auto flags = impl_->nft->table_flags(family);
    if (!flags) return tl::unexpected(flags.error());
    if (!*flags) {
      out.push_back({table_place(family), "present", ""});
      continue;
    }
    differ(out, table_place(family) + ", flags", std::to_string(expected.flags),
           std::to_string(**flags));
    for (const auto& [name, chain] : expected.chains) {
      auto found = impl_->nft->read_chain(family, name);
      if (!found) return tl::unexpected(found.error());
      const std::string place = table_place(family) + ", chain " + name;
      if (!*found) {
        out.push_back({place, "present", ""});
      } else {
        nft::compare(place, chain, **found, out);
      }
    }
  }
  // The sets that decide for everyone.
  GateSpec shared;
  shared.networks = impl_->networks;
  shared.host4 = impl_->host4;
  shared.host6 = impl_->host6;
  const nft::Table inet = ruleset::render(shared, impl_->table_flags).at(Family::inet);
  for (const char* name :
       {"always4", "always6", ruleset::kHostSet4, ruleset::kHostSet6, ruleset::kPool4,
        ruleset::kPool6, ruleset::kMasquerade4, ruleset::kMasquerade6}) {
    auto found = impl_->nft->read_set(Family::inet, name);
    if (!found) return tl::unexpected(found.error());
    const std::string place = table_place(Family::inet) + ", set " + name;
    if (!*found) {
      out.push_back({place, "present", ""});
    } else {
      nft::compare(place, inet.sets.at(name), **found, out);
    }
  }
  return out;
}

Result<std::vector<SandboxLink>> Gate::sandbox_links(int netns_fd) {
  auto rtnl = Rtnl::open_in(netns_fd);
  if (!rtnl) return tl::unexpected(rtnl.error());
  auto links = (*rtnl)->links();
  if (!links) return tl::unexpected(links.error());
  auto addresses = (*rtnl)->addresses();
  if (!addresses) return tl::unexpected(addresses.error());
  std::vector<SandboxLink> out;
  for (const Link& link : *links) {
    if (link.name.str() == "lo") continue;
    SandboxLink sandbox;
    sandbox.name = link.name;
    sandbox.index = link.index;
    sandbox.peer_index = link.peer;
    sandbox.mac = link.mac;
    sandbox.up = link.up;
    sandbox.kind = link.kind;
    for (const LinkAddress& address : *addresses) {
      if (address.link == link.index) sandbox.addresses.push_back(address.address);
    }
    out.push_back(std::move(sandbox));
  }
  return out;
}

Result<std::vector<Difference>> Gate::tie(const PortSpec& port, const SandboxLink& link,
                                          int netns_fd) {
  std::vector<Difference> out;
  auto host = impl_->rtnl->link(port.name);
  if (!host && host.error().code != ENODEV) return tl::unexpected(host.error());
  if (!host) {
    out.push_back({"host end " + port.name.str(), "present", ""});
    return out;
  }
  auto bridge = impl_->rtnl->link(port.bridge);
  if (!bridge && bridge.error().code != ENODEV) return tl::unexpected(bridge.error());
  auto id = impl_->rtnl->netns_id(netns_fd);
  if (!id) return tl::unexpected(id.error());
  differ(out, "kind of the container's link", "veth", link.kind);
  differ(out, "host end " + port.name.str() + ", other end", std::to_string(link.index),
         std::to_string(host->peer));
  differ(out, "container's link " + link.name.str() + ", other end", std::to_string(host->index),
         std::to_string(link.peer_index));
  const auto netns = [](const std::optional<std::int32_t>& n) {
    return n ? std::to_string(*n) : std::string("none");
  };
  differ(out, "host end " + port.name.str() + ", namespace of the other end", netns(*id),
         netns(host->peer_netns));
  if (!*id) out.push_back({"namespace of the sandbox", "known to the kernel", ""});
  differ(out, "MAC of the container's link", port.mac.to_string(), link.mac.to_string());
  differ(out, "bridge of " + port.name.str(), bridge ? std::to_string(bridge->index) : "none",
         std::to_string(host->master));
  return out;
}

Result<std::vector<IpAddress>> Gate::host_addresses() {
  auto addresses = impl_->rtnl->addresses();
  if (!addresses) return tl::unexpected(addresses.error());
  std::vector<IpAddress> out;
  for (const LinkAddress& address : *addresses) out.push_back(address.address);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace agentgate::netdriver

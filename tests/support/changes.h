// SPDX-License-Identifier: GPL-2.0-or-later
//
// What a stranger with root on the host may do to what is ours, as shell scripts. Variables:
// $port (a released port, or the one that is tried), $other (a closed port), $mac and $other_mac
// (of their containers), $ip4 and $ip6 (of the first), $bridge, $gateway4 and $gateway6 (with
// length). br9 is another bridge of the host.
#pragma once

namespace agentgate::test {

struct Change {
  const char* name;
  const char* script;     // $port, $other (the closed one), $bridge
  bool tables = false;    // needs tables that others may write to
  bool released = false;  // needs a released port
};

// Every one of them leaves something that is not as meant.
inline constexpr Change kChanges[] = {
    {"isolated", "bridge link set dev $port isolated off"},
    {"learning", "bridge link set dev $port learning on"},
    {"locked", "bridge link set dev $port locked off"},
    {"flood", "bridge link set dev $port flood on"},
    {"mcast_flood", "bridge link set dev $port mcast_flood on"},
    {"bcast_flood", "bridge link set dev $port bcast_flood on"},
    {"hairpin", "bridge link set dev $port hairpin on"},
    {"guard", "bridge link set dev $port guard on"},
    {"group_fwd_mask", "ip link set $port type bridge_slave group_fwd_mask 0"},
    {"neigh_suppress", "bridge link set dev $port neigh_suppress on"},
    {"fdb_foreign", "bridge fdb add 02:00:00:00:99:99 dev $port master static"},
    {"fdb_of_a_closed_port", "bridge fdb add $other_mac dev $other master static"},
    {"down", "ip link set $port down"},
    {"nomaster", "ip link set $port nomaster"},
    // Before Linux 6.2 only a link that is DOWN can be renamed, and the guard may be faster.
    {"renamed",
     "for i in $(seq 500); do printf 'link set %s down\\nlink set %s name other0\\n' $port $port |"
     " ip -b - && { ip link set other0 up || :; exit 0; }; done; exit 1"},
    {"moved", "ip link set $port master br9"},
    {"group", "ip link set $port group 5"},
    {"bridge_down", "ip link set $bridge down"},
    {"bridge_mac", "ip link set $bridge address 02:00:00:00:00:77"},
    {"bridge_group", "ip link set $bridge group 5"},
    {"bridge_address_gone", "ip addr del $gateway4 dev $bridge"},
    {"bridge_address6_gone", "ip addr del $gateway6 dev $bridge"},
    {"bridge_address_more", "ip addr add 172.30.9.1/24 dev $bridge"},
    {"bridge_stp", "ip link set $bridge type bridge stp_state 1"},
    {"bridge_snooping", "ip link set $bridge type bridge mcast_snooping 1"},
    {"bridge_fwd_mask", "ip link set $bridge type bridge group_fwd_mask 0x4008"},
    {"bridge_renamed",
     "for i in $(seq 500); do printf 'link set %s down\\nlink set %s name other1\\n' $bridge "
     "$bridge | ip -b - && exit 0; done; exit 1"},
    {"bridge_deleted", "ip link del $bridge"},
    {"flush_ruleset", "nft flush ruleset", true},
    {"table_inet_gone", "nft delete table inet agentgate", true},
    {"table_bridge_gone", "nft delete table bridge agentgate", true},
    {"table_netdev_gone", "nft delete table netdev agentgate", true},
    {"chain_flushed", "nft flush chain inet agentgate forward", true},
    {"policy_chain_flushed", "nft flush chain inet agentgate from4_web", true, true},
    {"port_chain_flushed", "nft flush chain netdev agentgate $port-in", true},
    {"rule_added", "nft insert rule inet agentgate input accept", true},
    {"element_gone", "nft delete element inet agentgate from4 \"{ $ip4 }\"", true, true},
    {"element_added", "nft add element inet agentgate web.allow4 '{ 203.0.113.1 . tcp . 1 }'", true,
     true},
    {"masquerade_gone", "nft flush set inet agentgate masquerade4", true},
};

// Controls of a released port.
inline constexpr Change kControls[] = {
    {"fdb_gone", "bridge fdb del $mac dev $port master"},
    {"fdb_moved", "bridge fdb replace $mac dev $other master static"},
    {"neighbour_gone", "ip neigh del $ip4 dev $bridge"},
    {"neighbour6_gone", "ip neigh del $ip6 dev $bridge"},
    {"neighbour_replaced",
     "ip neigh replace $ip4 lladdr 02:00:00:00:99:99 dev $bridge nud permanent"},
};

// What is not ours, and must not matter.
inline constexpr Change kSurroundings[] = {
    {"iptables_flush", "iptables -F; iptables -X; iptables -t nat -F"},
    {"iptables_policy_accept", "iptables -P FORWARD ACCEPT; iptables -P INPUT ACCEPT"},
    {"iptables_restore_empty", "printf '*filter\\nCOMMIT\\n' | iptables-restore"},
    {"ip6tables_flush", "ip6tables -F; ip6tables -X"},
    {"iptables_legacy",
     "iptables-legacy -F; iptables-legacy -X; iptables-legacy -P FORWARD ACCEPT;"
     "printf '*filter\\nCOMMIT\\n' | iptables-legacy-restore;"
     "ip6tables-legacy -F; ip6tables-legacy -P FORWARD ACCEPT"},
    {"forwarding_off_on", "sysctl -qw net.ipv4.ip_forward=0; sysctl -qw net.ipv4.ip_forward=1"},
    {"br_netfilter_off",
     "sysctl -qw net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0 "
     "net.bridge.bridge-nf-call-arptables=0"},
    {"br_netfilter_on",
     "sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1 "
     "net.bridge.bridge-nf-call-arptables=1"},
    {"clsact", "tc qdisc add dev $port clsact; tc qdisc del dev $port clsact"},
    {"port_mac", "ip link set $port address 02:00:00:00:55:55"},
    {"flush_of_owned_tables", "nft flush ruleset"},
};

}  // namespace agentgate::test

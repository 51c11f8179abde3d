// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/policy/policy.h"

#include <algorithm>
#include <set>

#include "plugin/policy/json_tree.h"
#include "plugin/policy/keys.h"

namespace agentgate::policy {
namespace {

using netdriver::always_deny4;
using netdriver::always_deny6;

constexpr std::size_t kMaxErrors = 50;
constexpr std::size_t kMaxNames = 256;
constexpr std::size_t kMaxPrefixes = 4000;
constexpr std::size_t kMaxResolvers = 8;
constexpr std::int64_t kMaxSeconds = 7 * 24 * 3600;

template <class Address>
std::optional<AddressRange<Address>> overlap(const AddressRange<Address>& range,
                                             const std::vector<AddressRange<Address>>& list) {
  for (const auto& other : list) {
    if (range.first <= other.last && other.first <= range.last) return other;
  }
  return std::nullopt;
}

// Never reachable, not even as an exception: nothing legitimate of an agent is there.
const std::vector<Ipv4Range>& never4() {
  static const std::vector<Ipv4Range> list = {
      Ipv4Prefix::parse("0.0.0.0/8").value().range(),
      Ipv4Prefix::parse("127.0.0.0/8").value().range(),
      Ipv4Prefix::parse("169.254.0.0/16").value().range(),
      Ipv4Prefix::parse("224.0.0.0/3").value().range()};
  return list;
}
const std::vector<Ipv6Range>& never6() {
  static const std::vector<Ipv6Range> list = {
      Ipv6Prefix::parse("::/16").value().range(), Ipv6Prefix::parse("fe80::/9").value().range(),
      Ipv6Prefix::parse("ff00::/8").value().range(),
      // Metadata services of public clouds on ULA addresses.
      Ipv6Prefix::parse("fd00:ec2::254").value().range(),
      Ipv6Prefix::parse("fd20:ce::254").value().range()};
  return list;
}

class Parser {
 public:
  Parser(std::string name, std::string file, ParseResult& out) : file_(std::move(file)), out_(out) {
    out_.policy.name = std::move(name);
  }

  void run(const Node& root) {
    if (!expect(root, Node::Kind::object, "the policy")) return;
    known_keys(root, kPolicyKeys, "a policy");
    const Node* version = root.find("version");
    if (version == nullptr) {
      error(root.at, "\"version\" is missing; write \"version\": 1");
    } else if (version->kind != Node::Kind::integer || version->integer != 1) {
      error(version->at, "\"version\" must be 1: this is all that this agentgate knows");
    }
    text(root, "description", out_.policy.description);
    std::string ignored;
    text(root, "comment", ignored);
    for_each(root, "allow", [&](const Node& node) { allow(node); });
    for_each(root, "deny", [&](const Node& node) { deny(node); });
    for_each(root, "private", [&](const Node& node) { private_rule(node); });
    for_each(root, "resolvers", [&](const Node& node) { resolver(node); });
    if (root.find("runtimes") != nullptr) {
      for_each(root, "runtimes", [&](const Node& node) { runtime(node); });
      if (out_.policy.runtimes.empty() && out_.errors.empty()) {
        error(root.find("runtimes")->at, "\"runtimes\" is empty; name at least one, e.g. \"runsc\"");
      }
    } else {
      out_.policy.runtimes = {"runsc"};
    }
    flag(root, "reject", out_.policy.reject);
    seconds(root, "refresh_seconds", out_.policy.refresh, 1);
    seconds(root, "grace_seconds", out_.policy.grace, 0);
    if (out_.policy.names.size() > kMaxNames) {
      error(root.at, std::to_string(out_.policy.names.size()) + " names; a policy takes " +
                         std::to_string(kMaxNames) + ": split it");
    }
    const std::size_t prefixes = out_.policy.prefixes.size() + out_.policy.deny.size() +
                                 out_.policy.private_rules.size();
    if (prefixes > kMaxPrefixes) {
      error(root.at, std::to_string(prefixes) + " prefixes; a policy takes " +
                         std::to_string(kMaxPrefixes) + ": merge or split them");
    }
  }

  void error(const Place& at, const std::string& text) {
    if (out_.errors.size() < kMaxErrors) out_.errors.push_back(where(at) + text);
    if (out_.errors.size() == kMaxErrors) out_.errors.push_back("more errors are not shown");
  }

 private:
  [[nodiscard]] std::string where(const Place& at) const {
    return file_ + ":" + std::to_string(at.line) + ":" + std::to_string(at.column) + ": ";
  }
  [[nodiscard]] Location location(const Place& at) const { return {file_, at.line, at.column}; }

  bool expect(const Node& node, Node::Kind kind, const std::string& what) {
    if (node.kind == kind) return true;
    error(node.at, what + " must be " + to_string(kind) + ", this is " + to_string(node.kind));
    return false;
  }

  template <std::size_t N>
  void known_keys(const Node& object, const std::array<const char*, N>& keys, const char* what) {
    for (std::size_t i = 0; i < object.keys.size(); ++i) {
      if (std::find(keys.begin(), keys.end(), object.keys[i]) != keys.end()) continue;
      std::string list;
      for (const char* key : keys) list += (list.empty() ? "" : ", ") + std::string(key);
      error(object.key_places[i],
            "unknown key \"" + object.keys[i] + "\"; " + what + " has: " + list);
    }
  }

  void text(const Node& object, const char* key, std::string& out) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::string, "\"" + std::string(key) + "\"")) return;
    out = node->string;
  }
  void flag(const Node& object, const char* key, bool& out) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::boolean, "\"" + std::string(key) + "\"")) return;
    out = node->boolean;
  }
  void seconds(const Node& object, const char* key, std::chrono::seconds& out, std::int64_t least) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::integer, "\"" + std::string(key) + "\"")) return;
    if (node->integer < least || node->integer > kMaxSeconds) {
      error(node->at, "\"" + std::string(key) + "\" must be between " + std::to_string(least) +
                          " and " + std::to_string(kMaxSeconds) + " (a week)");
      return;
    }
    out = std::chrono::seconds(node->integer);
  }
  template <class Each>
  void for_each(const Node& object, const char* key, const Each& each) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::array, "\"" + std::string(key) + "\"")) return;
    for (const Node& item : node->items) each(item);
  }

  std::vector<Service> services(const Node& rule, bool required) {
    std::vector<Service> out;
    const Node* node = rule.find("services");
    if (node == nullptr) {
      if (required) {
        error(rule.at, "\"services\" is missing; write for example \"services\": [\"tcp/443\"]");
      }
      return out;
    }
    if (!expect(*node, Node::Kind::array, "\"services\"")) return out;
    if (node->items.empty()) error(node->at, "\"services\" is empty; write for example [\"tcp/443\"]");
    for (const Node& item : node->items) {
      if (!expect(item, Node::Kind::string, "a service")) continue;
      auto service = Service::parse(item.string);
      if (!service) {
        error(item.at, service.error().text);
      } else {
        out.push_back(*service);
      }
    }
    return out;
  }

  std::optional<std::variant<Ipv4Prefix, Ipv6Prefix>> prefix(const Node& node) {
    if (!expect(node, Node::Kind::string, "\"cidr\"")) return std::nullopt;
    if (node.string.find(':') != std::string::npos) {
      auto v6 = Ipv6Prefix::parse(node.string);
      if (v6) return *v6;
      error(node.at, v6.error().text);
    } else {
      auto v4 = Ipv4Prefix::parse(node.string);
      if (v4) return *v4;
      error(node.at, v4.error().text);
    }
    return std::nullopt;
  }

  void allow(const Node& node) {
    if (!expect(node, Node::Kind::object, "an entry of \"allow\"")) return;
    known_keys(node, kAllowKeys, "an entry of \"allow\"");
    const Node* name = node.find("name");
    const Node* cidr = node.find("cidr");
    if ((name == nullptr) == (cidr == nullptr)) {
      error(node.at, "an entry of \"allow\" has either \"name\" or \"cidr\"");
      return;
    }
    std::string comment;
    text(node, "comment", comment);
    std::vector<Service> list = services(node, true);
    if (name != nullptr) {
      NameRule rule;
      rule.services = std::move(list);
      rule.comment = std::move(comment);
      rule.at = location(name->at);
      flag(node, "optional", rule.optional);
      if (!expect(*name, Node::Kind::string, "\"name\"") || !check_name(*name)) return;
      rule.name = name->string;
      out_.policy.names.push_back(std::move(rule));
      return;
    }
    if (const Node* optional = node.find("optional")) {
      error(optional->at, "\"optional\" is for names; a prefix needs no resolving");
    }
    PrefixRule rule;
    rule.services = std::move(list);
    rule.comment = std::move(comment);
    rule.at = location(cidr->at);
    const auto parsed = prefix(*cidr);
    if (!parsed) return;
    rule.prefix = *parsed;
    if (const std::string range = in_always_deny(*parsed); !range.empty()) {
      error(cidr->at, "'" + cidr->string + "' overlaps " + range +
                          ", which is always denied; name single addresses and ports under "
                          "\"private\" if an agent really needs them");
      return;
    }
    out_.policy.prefixes.push_back(std::move(rule));
  }

  static std::string in_always_deny(const std::variant<Ipv4Prefix, Ipv6Prefix>& prefix) {
    if (const auto* v4 = std::get_if<Ipv4Prefix>(&prefix)) {
      const auto hit = overlap(v4->range(), always_deny4());
      return hit ? hit->first.to_string() + "-" + hit->last.to_string() : "";
    }
    const auto hit = overlap(std::get<Ipv6Prefix>(prefix).range(), always_deny6());
    return hit ? hit->first.to_string() + "-" + hit->last.to_string() : "";
  }
  static bool is_never(const IpAddress& address) {
    return address.is_v4() ? overlap(Ipv4Range{address.v4(), address.v4()}, never4()).has_value()
                           : overlap(Ipv6Range{address.v6(), address.v6()}, never6()).has_value();
  }

  bool check_name(const Node& node) {
    const std::string& name = node.string;
    const auto bad = [&](const std::string& why) {
      error(node.at, "'" + name.substr(0, 100) + "' " + why);
      return false;
    };
    if (name.find("://") != std::string::npos || name.find('/') != std::string::npos) {
      return bad("is a URL; write the host name alone and the port under \"services\"");
    }
    if (name.find(':') != std::string::npos) {
      return bad("has a port; write the host name alone and \"services\": [\"tcp/PORT\"]");
    }
    if (name.find('*') != std::string::npos) {
      if (name.rfind("*.", 0) == 0 || name.rfind("**.", 0) == 0) {
        return bad("is a wildcard; wildcards need the resolver gateway, which this version does "
                   "not have: list the names");
      }
      return bad("has a '*'; list the names");
    }
    if (name.empty() || name.size() > 253) return bad("is not between 1 and 253 characters long");
    if (name.back() == '.') return bad("ends in a dot; leave it out");
    std::size_t labels = 0;
    bool digits_only = false;
    for (std::size_t at = 0; at <= name.size();) {
      const std::size_t dot = std::min(name.find('.', at), name.size());
      const std::string label = name.substr(at, dot - at);
      if (label.empty() || label.size() > 63) return bad("has a label of no or over 63 characters");
      if (label.front() == '-' || label.back() == '-') return bad("has a label with '-' at its end");
      for (const char c : label) {
        if (c >= 'A' && c <= 'Z') return bad("has capitals; write it in lower case");
        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_')) {
          return bad("has characters other than a-z, 0-9, '-' and '_' (write international names in "
                     "their xn-- form)");
        }
      }
      digits_only = std::all_of(label.begin(), label.end(), [](char c) { return c >= '0' && c <= '9'; });
      ++labels;
      at = dot + 1;
    }
    if (digits_only) return bad("is an address, not a name; write it as \"cidr\"");
    if (labels < 2) return bad("is a single label; write the full name");
    return true;
  }

  void deny(const Node& node) {
    if (!expect(node, Node::Kind::object, "an entry of \"deny\"")) return;
    known_keys(node, kDenyKeys, "an entry of \"deny\"");
    const Node* cidr = node.find("cidr");
    if (cidr == nullptr) {
      error(node.at, "an entry of \"deny\" needs \"cidr\"");
      return;
    }
    PrefixRule rule;
    text(node, "comment", rule.comment);
    rule.services = services(node, false);
    rule.at = location(cidr->at);
    const auto parsed = prefix(*cidr);
    if (!parsed) return;
    rule.prefix = *parsed;
    out_.policy.deny.push_back(std::move(rule));
  }

  void private_rule(const Node& node) {
    if (!expect(node, Node::Kind::object, "an entry of \"private\"")) return;
    known_keys(node, kPrivateKeys, "an entry of \"private\"");
    const Node* address = node.find("address");
    const Node* service = node.find("service");
    if (address == nullptr || service == nullptr) {
      error(node.at, "an entry of \"private\" needs \"address\" and \"service\", e.g. "
                     "{\"address\": \"10.0.0.5\", \"service\": \"tcp/5432\"}");
      return;
    }
    PrefixRule rule;
    text(node, "comment", rule.comment);
    rule.at = location(address->at);
    if (!expect(*address, Node::Kind::string, "\"address\"") ||
        !expect(*service, Node::Kind::string, "\"service\"")) {
      return;
    }
    auto ip = IpAddress::parse(address->string);
    if (!ip) {
      error(address->at, ip.error().text + "; \"private\" takes one address, no prefix");
      return;
    }
    auto parsed = Service::parse(service->string);
    if (!parsed) {
      error(service->at, parsed.error().text);
      return;
    }
    if (!parsed->ports.single()) {
      error(service->at, "'" + service->string + "' is a range; \"private\" takes one port");
      return;
    }
    if (is_never(*ip)) {
      error(address->at, "'" + address->string +
                             "' is loopback, link-local, multicast or a metadata address; no policy "
                             "opens these");
      return;
    }
    rule.prefix = ip->is_v4() ? std::variant<Ipv4Prefix, Ipv6Prefix>(Ipv4Prefix(ip->v4(), 32))
                              : std::variant<Ipv4Prefix, Ipv6Prefix>(Ipv6Prefix(ip->v6(), 128));
    rule.services = {*parsed};
    out_.policy.private_rules.push_back(std::move(rule));
  }

  void resolver(const Node& node) {
    if (!expect(node, Node::Kind::string, "a resolver")) return;
    auto ip = IpAddress::parse(node.string);
    if (!ip) {
      error(node.at, ip.error().text);
      return;
    }
    if (is_never(*ip)) {
      error(node.at, "'" + node.string +
                         "' is loopback, link-local, multicast or a metadata address; a container "
                         "cannot use it as its resolver");
      return;
    }
    if (out_.policy.resolvers.size() >= kMaxResolvers) {
      error(node.at, "more than " + std::to_string(kMaxResolvers) + " resolvers");
      return;
    }
    out_.policy.resolvers.push_back(*ip);
  }

  void runtime(const Node& node) {
    if (!expect(node, Node::Kind::string, "a runtime")) return;
    if (node.string != "runsc" && node.string != "runc") {
      error(node.at, "'" + node.string + "' is not a runtime that agentgate can verify; it knows "
                     "\"runsc\" and \"runc\" (what the runtime is, not what the engine calls it)");
      return;
    }
    out_.policy.runtimes.push_back(node.string);
  }

  std::string file_;
  ParseResult& out_;
};

template <class Address>
using Entries = std::vector<netdriver::AllowEntry<Address>>;

template <class Address>
void add_entries(Entries<Address>& out, const AddressRange<Address>& range,
                 const std::vector<Service>& services) {
  for (const Service& service : services) out.push_back({range, service.protocol, service.ports});
}

const std::vector<Service>& dns_services() {
  static const std::vector<Service> services = {{Protocol::udp, {53, 53}}, {Protocol::tcp, {53, 53}}};
  return services;
}

// One address family of compile(). `ip` picks the family's address out of an IpAddress.
template <class Address>
netdriver::PolicyFamily<Address> compile_family(const Policy& policy, const Resolution& resolution,
                                                const std::vector<AddressRange<Address>>& always,
                                                const std::vector<IpAddress>& host,
                                                Compiled& out) {
  constexpr bool v4 = Address::family == Family::ipv4;
  const auto of = [](const IpAddress& ip) -> std::optional<Address> {
    if (ip.is_v4() != v4) return std::nullopt;
    if constexpr (v4) {
      return ip.v4();
    } else {
      return ip.v6();
    }
  };
  const auto range_of = [](const std::variant<Ipv4Prefix, Ipv6Prefix>& prefix)
      -> std::optional<AddressRange<Address>> {
    const auto* mine = std::get_if<BasicPrefix<Address>>(&prefix);
    return mine == nullptr ? std::nullopt : std::optional(mine->range());
  };

  netdriver::PolicyFamily<Address> family;
  Entries<Address> allow;
  Entries<Address> exceptions;
  Entries<Address> deny_services;
  for (const PrefixRule& rule : policy.prefixes) {
    if (const auto range = range_of(rule.prefix)) add_entries(allow, *range, rule.services);
  }
  for (const NameRule& rule : policy.names) {
    const auto known = resolution.names.find(rule.name);
    if (known == resolution.names.end()) continue;
    for (const ResolvedAddress& resolved : known->second.addresses) {
      const auto address = of(resolved.address);
      if (!address) continue;
      const AddressRange<Address> range{*address, *address};
      const bool own = std::find(host.begin(), host.end(), resolved.address) != host.end();
      if (own || overlap(range, always)) {
        out.notes.push_back(rule.name + ": " + resolved.address.to_string() + " is " +
                            (own ? "an address of this host" : "in the always-deny set") +
                            " and is left out");
        continue;
      }
      add_entries(allow, range, rule.services);
    }
  }
  for (const PrefixRule& rule : policy.private_rules) {
    if (const auto range = range_of(rule.prefix)) add_entries(exceptions, *range, rule.services);
  }
  for (const IpAddress& resolver : policy.resolvers) {
    const auto address = of(resolver);
    if (!address) continue;
    const AddressRange<Address> range{*address, *address};
    add_entries(overlap(range, always) ? exceptions : allow, range, dns_services());
  }
  for (const PrefixRule& rule : policy.deny) {
    const auto range = range_of(rule.prefix);
    if (!range) continue;
    if (rule.services.empty()) {
      family.deny.push_back(*range);
    } else {
      add_entries(deny_services, *range, rule.services);
    }
  }
  family.allow = netdriver::subtract(allow, deny_services);
  family.private_entries = netdriver::subtract(exceptions, deny_services);
  return family;
}

}  // namespace

ParseResult parse(std::string_view text, const std::string& name, const std::string& file) {
  ParseResult out;
  Parser parser(name, file, out);
  const TreeResult tree = read_tree(text);
  if (!tree.error.empty()) {
    parser.error(tree.at, tree.error);
    return out;
  }
  parser.run(tree.root);
  return out;
}

const Policy& builtin() {
  static const Policy policy = [] {
    Policy out;
    out.name = "default";
    out.description = "built in: applies while there is no default.json";
    for (const char* name : {"api.anthropic.com", "platform.claude.com"}) {
      NameRule rule;
      rule.name = name;
      rule.services = {{Protocol::tcp, {443, 443}}};
      out.names.push_back(std::move(rule));
    }
    out.resolvers = {IpAddress::parse("1.1.1.1").value(), IpAddress::parse("9.9.9.9").value()};
    out.runtimes = {"runsc"};
    out.revision = "builtin";
    return out;
  }();
  return policy;
}

Compiled compile(const Policy& policy, const Resolution& resolution,
                 const std::vector<IpAddress>& host) {
  Compiled out;
  out.spec.name = policy.name;
  out.spec.reject = policy.reject;
  out.spec.v4 = compile_family<Ipv4Address>(policy, resolution, always_deny4(), host, out);
  out.spec.v6 = compile_family<Ipv6Address>(policy, resolution, always_deny6(), host, out);
  out.spec = netdriver::normalise(std::move(out.spec));
  std::set<std::string> seen;
  for (const NameRule& rule : policy.names) {
    if (!seen.insert(rule.name).second) continue;
    const auto known = resolution.names.find(rule.name);
    const bool usable =
        known != resolution.names.end() &&
        std::any_of(known->second.addresses.begin(), known->second.addresses.end(),
                    [&](const ResolvedAddress& resolved) {
                      const IpAddress& ip = resolved.address;
                      if (std::find(host.begin(), host.end(), ip) != host.end()) return false;
                      return ip.is_v4() ? !overlap(Ipv4Range{ip.v4(), ip.v4()}, always_deny4())
                                        : !overlap(Ipv6Range{ip.v6(), ip.v6()}, always_deny6());
                    });
    if (usable) continue;
    const std::string why = known == resolution.names.end() || known->second.error.empty()
                                ? "has no usable address"
                                : known->second.error;
    const bool optional = std::all_of(policy.names.begin(), policy.names.end(),
                                      [&](const NameRule& other) {
                                        return other.name != rule.name || other.optional;
                                      });
    (optional ? out.notes : out.unresolved).push_back(rule.name + ": " + why);
  }
  return out;
}

std::vector<std::string> conflicts_with_host(const Policy& policy,
                                             const std::vector<IpAddress>& host) {
  std::vector<std::string> out;
  const auto check = [&](const PrefixRule& rule) {
    for (const IpAddress& ip : host) {
      const bool hit = ip.is_v4() ? std::holds_alternative<Ipv4Prefix>(rule.prefix) &&
                                        std::get<Ipv4Prefix>(rule.prefix).contains(ip.v4())
                                  : std::holds_alternative<Ipv6Prefix>(rule.prefix) &&
                                        std::get<Ipv6Prefix>(rule.prefix).contains(ip.v6());
      if (!hit) continue;
      out.push_back(rule.at.file + ":" + std::to_string(rule.at.line) + ":" +
                    std::to_string(rule.at.column) + ": covers " + ip.to_string() +
                    ", an address of this host; the host is never reachable: narrow the entry");
    }
  };
  for (const PrefixRule& rule : policy.prefixes) check(rule);
  for (const PrefixRule& rule : policy.private_rules) check(rule);
  return out;
}

std::string resolv_conf(const Policy& policy) {
  std::string out = "# Written by agentgate when the container was armed.\n";
  for (std::size_t i = 0; i < policy.resolvers.size() && i < 3; ++i) {  // MAXNS of resolv.h
    out += "nameserver " + policy.resolvers[i].to_string() + "\n";
  }
  return out + "options ndots:1 timeout:2 attempts:2\n";
}

}  // namespace agentgate::policy

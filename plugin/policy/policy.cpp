// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/policy/policy.h"

#include <openssl/evp.h>

#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "plugin/policy/json_tree.h"
#include "plugin/policy/keys.h"

namespace agentgate::policy {
namespace {

using netdriver::always_deny4;
using netdriver::always_deny6;

constexpr std::size_t kMaxErrors = 50;
constexpr std::size_t kMaxNames = 256;
constexpr std::size_t kMaxPrefixes = 4000;
constexpr std::size_t kMaxServices = 32;      // of one entry
constexpr std::size_t kMaxExpanded = 32'000;  // entries times services
constexpr std::size_t kMaxResolvers = 8;
constexpr std::size_t kResolversUsed = 3;  // MAXNS of resolv.h
constexpr std::size_t kMaxComment = 1024;
constexpr std::int64_t kMaxSeconds = 604'800;  // a week

template <class Address>
std::optional<AddressRange<Address>> overlap(const AddressRange<Address>& range,
                                             const std::vector<AddressRange<Address>>& list) {
  for (const auto& other : list) {
    if (range.first <= other.last && other.first <= range.last) return other;
  }
  return std::nullopt;
}

template <class Address>
std::vector<AddressRange<Address>> ranges_of(std::initializer_list<const char*> prefixes) {
  std::vector<AddressRange<Address>> out;
  for (const char* text : prefixes) {
    out.push_back(BasicPrefix<Address>::parse(text).value().range());
  }
  return merge(std::move(out));
}

// Never reachable, not even as an exception: nothing legitimate of an agent is there.
const std::vector<Ipv4Range>& never4() {
  static const auto list = ranges_of<Ipv4Address>(
      {"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3",
       // Metadata services outside of link-local: Alibaba Cloud, Oracle Cloud.
       "100.100.100.200/32", "192.0.0.192/32"});
  return list;
}
const std::vector<Ipv6Range>& never6() {
  static const auto list = ranges_of<Ipv6Address>(
      {"::/16", "fe80::/9", "ff00::/8",
       // An IPv4 address in other clothes would pass the list above: NAT64, 6to4, Teredo.
       "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32",
       // Metadata services of AWS and Google Cloud on ULA addresses.
       "fd00:ec2::254/128", "fd20:ce::254/128"});
  return list;
}

bool is_never(const IpAddress& ip) {
  return ip.is_v4() ? overlap(Ipv4Range{ip.v4(), ip.v4()}, never4()).has_value()
                    : overlap(Ipv6Range{ip.v6(), ip.v6()}, never6()).has_value();
}
bool is_always_denied(const IpAddress& ip) {
  return ip.is_v4() ? overlap(Ipv4Range{ip.v4(), ip.v4()}, always_deny4()).has_value()
                    : overlap(Ipv6Range{ip.v6(), ip.v6()}, always_deny6()).has_value();
}
bool covers(const std::variant<Ipv4Prefix, Ipv6Prefix>& prefix, const IpAddress& ip) {
  if (const auto* v4 = std::get_if<Ipv4Prefix>(&prefix)) return ip.is_v4() && v4->contains(ip.v4());
  return ip.is_v6() && std::get<Ipv6Prefix>(prefix).contains(ip.v6());
}
std::string text_of(const std::variant<Ipv4Prefix, Ipv6Prefix>& prefix) {
  return std::visit([](const auto& value) { return value.to_string(); }, prefix);
}

// Reads one policy file's tree into a Policy and collects what is wrong with it.
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
      if (const Node& list = *root.find("runtimes");
          list.kind == Node::Kind::array && list.items.empty()) {
        error(list.at, "\"runtimes\" is empty; name at least one, e.g. \"runsc\"");
      }
    } else {
      out_.policy.runtimes = {"runsc"};
    }
    flag(root, "reject", out_.policy.reject);
    flag(root, "accept_host_resolver", out_.policy.accept_host_resolver);
    seconds(root, "refresh_seconds", out_.policy.refresh, 1);
    seconds(root, "grace_seconds", out_.policy.grace, 0);
    std::set<std::string_view> names;
    std::size_t expanded = 0;
    for (const NameRule& rule : out_.policy.names) {
      names.insert(rule.name);
      expanded += rule.services.size();
    }
    if (names.size() > kMaxNames) {
      error(root.at, std::to_string(names.size()) + " names; a policy takes " +
                         std::to_string(kMaxNames) + ": split it");
    }
    const std::size_t prefixes =
        out_.policy.prefixes.size() + out_.policy.deny.size() + out_.policy.private_rules.size();
    if (prefixes > kMaxPrefixes) {
      error(root.at, std::to_string(prefixes) + " prefixes; a policy takes " +
                         std::to_string(kMaxPrefixes) + ": merge or split them");
    }
    for (const PrefixRule& rule : out_.policy.prefixes) expanded += rule.services.size();
    for (const PrefixRule& rule : out_.policy.deny) expanded += rule.services.size();
    if (expanded > kMaxExpanded) {
      error(root.at, std::to_string(expanded) +
                         " services in all entries together; a policy takes " +
                         std::to_string(kMaxExpanded) + ": use port ranges, or split it");
    }
    if (out_.errors.empty()) warnings(root);
  }

  void error(const Place& at, const std::string& text) {
    if (out_.errors.size() > kMaxErrors) return;
    out_.errors.push_back(out_.errors.size() < kMaxErrors ? where(at) + text
                                                          : file_ + ": more errors are not shown");
  }

 private:
  void warning(const Place& at, const std::string& text) {
    if (out_.warnings.size() < kMaxErrors) out_.warnings.push_back(where(at) + text);
  }
  // What is legal but is rarely meant.
  void warnings(const Node& root) {
    const Policy& policy = out_.policy;
    if (policy.names.empty() && policy.prefixes.empty() && policy.private_rules.empty()) {
      warning(root.at, "nothing is allowed: a container with this policy reaches nothing");
    }
    if (!policy.names.empty() && policy.resolvers.empty()) {
      warning(root.at,
              "there are names but no \"resolvers\": the container itself cannot resolve them");
    }
    const Node* list = root.find("resolvers");
    for (std::size_t i = 0;
         list != nullptr && i < list->items.size() && i < policy.resolvers.size(); ++i) {
      const IpAddress& ip = policy.resolvers[i];
      const Place at = list->items[i].at;
      if (std::find(policy.resolvers.begin(),
                    policy.resolvers.begin() + static_cast<std::ptrdiff_t>(i),
                    ip) != policy.resolvers.begin() + static_cast<std::ptrdiff_t>(i)) {
        warning(at, ip.to_string() + " stands twice");
      } else if (i >= kResolversUsed) {
        warning(at, ip.to_string() + " is reachable, but a resolver file holds only the first " +
                        std::to_string(kResolversUsed));
      }
      for (const PrefixRule& rule : policy.deny) {
        if (rule.services.empty() && covers(rule.prefix, ip)) {
          warning(at, ip.to_string() + " is denied by " + text_of(rule.prefix) + " in line " +
                          std::to_string(rule.at.line));
        }
      }
    }
  }

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
            "unknown key " + quote(object.keys[i]) + "; " + what + " has: " + list);
    }
  }

  void text(const Node& object, const char* key, std::string& out) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::string, "\"" + std::string(key) + "\""))
      return;
    const std::string& value = node->string;
    if (value.size() > kMaxComment) {
      error(node->at, "\"" + std::string(key) + "\" is longer than " + std::to_string(kMaxComment) +
                          " bytes");
      return;
    }
    // These texts end on terminals, where control characters are commands.
    if (std::any_of(value.begin(), value.end(), [](char c) {
          return (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
        })) {
      error(node->at, "\"" + std::string(key) + "\" holds control characters; leave them out");
      return;
    }
    out = value;
  }
  void flag(const Node& object, const char* key, bool& out) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::boolean, "\"" + std::string(key) + "\""))
      return;
    out = node->boolean;
  }
  void seconds(const Node& object, const char* key, std::chrono::seconds& out, std::int64_t least) {
    const Node* node = object.find(key);
    if (node == nullptr || !expect(*node, Node::Kind::integer, "\"" + std::string(key) + "\""))
      return;
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
    if (node == nullptr || !expect(*node, Node::Kind::array, "\"" + std::string(key) + "\""))
      return;
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
    if (node->items.empty())
      error(node->at, "\"services\" is empty; write for example [\"tcp/443\"]");
    if (node->items.size() > kMaxServices) {
      error(node->at, std::to_string(node->items.size()) + " services; an entry takes " +
                          std::to_string(kMaxServices) + ": use port ranges");
      return out;
    }
    for (const Node& item : node->items) {
      if (!expect(item, Node::Kind::string, "a service") || !printable(item)) continue;
      auto service = Service::parse(item.string);
      if (!service) {
        error(item.at, service.error().text);
      } else {
        out.push_back(*service);
      }
    }
    return out;
  }

  // The parsers of the value types quote what they were given.
  bool printable(const Node& node) {
    if (node.string.size() <= 100 && std::all_of(node.string.begin(), node.string.end(),
                                                 [](char c) { return c >= 0x20 && c < 0x7F; })) {
      return true;
    }
    error(node.at,
          quote(node.string) + " is longer than 100 bytes or holds other characters than ASCII");
    return false;
  }

  std::optional<std::variant<Ipv4Prefix, Ipv6Prefix>> prefix(const Node& node) {
    if (!expect(node, Node::Kind::string, "\"cidr\"") || !printable(node)) return std::nullopt;
    if (node.string.find(':') != std::string::npos) {
      auto v6 = Ipv6Prefix::parse(node.string);
      if (v6 && v6->first().is_v4_mapped()) {
        error(node.at, quote(node.string) +
                           " is an IPv4 prefix in IPv6 clothes; write the IPv4 one, e.g. " +
                           plain(v6->first()));
        return std::nullopt;
      }
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

  static std::string plain(const Ipv6Address& mapped) {
    const auto& bytes = mapped.bytes();
    return Ipv4Address({bytes[12], bytes[13], bytes[14], bytes[15]}).to_string();
  }
  std::optional<IpAddress> address(const Node& node, const char* what) {
    if (!expect(node, Node::Kind::string, what) || !printable(node)) return std::nullopt;
    auto ip = IpAddress::parse(node.string);
    if (!ip) {
      error(node.at, ip.error().text + "; " + what + " is one address, no name and no prefix");
      return std::nullopt;
    }
    if (ip->is_v6() && ip->v6().is_v4_mapped()) {
      error(node.at,
            quote(node.string) + " is an IPv4 address in IPv6 clothes; write " + plain(ip->v6()));
      return std::nullopt;
    }
    return *ip;
  }

  static std::string in_always_deny(const std::variant<Ipv4Prefix, Ipv6Prefix>& prefix) {
    if (const auto* v4 = std::get_if<Ipv4Prefix>(&prefix)) {
      const auto hit = overlap(v4->range(), always_deny4());
      return hit ? hit->first.to_string() + "-" + hit->last.to_string() : "";
    }
    const auto hit = overlap(std::get<Ipv6Prefix>(prefix).range(), always_deny6());
    return hit ? hit->first.to_string() + "-" + hit->last.to_string() : "";
  }
  bool check_name(const Node& node) {
    const std::string& name = node.string;
    const auto bad = [&](const std::string& why) {
      error(node.at, quote(name) + " " + why);
      return false;
    };
    if (IpAddress::parse(name) || Ipv4Prefix::parse(name) || Ipv6Prefix::parse(name)) {
      return bad("is an address, not a name; write \"cidr\" instead of \"name\"");
    }
    if (name.find("//") != std::string::npos) {
      return bad("is a URL; write the host name alone, and its port under \"services\"");
    }
    if (name.find('/') != std::string::npos) {
      return bad(
          "has a path; write the host name alone: what is allowed are addresses and ports, "
          "not pages");
    }
    if (name.find(':') != std::string::npos) {
      return bad("has a port; write the host name alone, and \"services\": [\"tcp/PORT\"]");
    }
    if (name.find('*') != std::string::npos) return bad(wildcard(name));
    if (name.empty() || name.size() > 253) return bad("is not between 1 and 253 characters long");
    if (name.back() == '.') return bad("ends in a dot; leave it out");
    std::size_t labels = 0;
    std::string label;
    for (std::size_t at = 0; at <= name.size(); ++labels) {
      const std::size_t dot = std::min(name.find('.', at), name.size());
      label = name.substr(at, dot - at);
      if (label.empty()) return bad("has two dots in a row, or one at its beginning");
      if (label.size() > 63) return bad("has a label of more than 63 characters");
      if (label.front() == '-' || label.back() == '-') {
        return bad("has a label that begins or ends with '-'");
      }
      for (const char c : label) {
        if (c >= 'A' && c <= 'Z') return bad("has capitals; write it in lower case");
        if (!(is_digit(c) || (c >= 'a' && c <= 'z') || c == '-')) {
          return bad(
              "has characters other than a-z, 0-9 and '-'; write international names in "
              "their xn-- form");
        }
      }
      at = dot + 1;
    }
    // Some programs read such a last label as part of an IPv4 address.
    if (std::all_of(label.begin(), label.end(), is_digit) || label.rfind("0x", 0) == 0) {
      return bad(
          "ends in a number and could be read as an address; write \"cidr\" instead of "
          "\"name\" if it is one");
    }
    if (labels < 2) return bad("is a single label; write the full name, e.g. api.example.com");
    return true;
  }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static std::string wildcard(const std::string& name) {
    const std::string rest = name.substr(std::min(name.find_first_not_of('*'), name.size()));
    if (rest.empty() || rest == ".") return "allows every name; list the names";
    const bool leading = rest[0] == '.' && name.size() - rest.size() <= 2;
    if (!leading || rest.find('*') != std::string::npos) {
      return "has a '*' inside; list the names";
    }
    if (rest.find('.', 1) == std::string::npos) {
      return "allows a whole top-level domain; list the names";
    }
    return "is a wildcard; wildcards need the resolver gateway, which this version does not have: "
           "list the names";
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
      error(node.at,
            "an entry of \"private\" needs \"address\" and \"service\", e.g. "
            "{\"address\": \"10.0.0.5\", \"service\": \"tcp/5432\"}");
      return;
    }
    PrefixRule rule;
    text(node, "comment", rule.comment);
    rule.at = location(address->at);
    if (!expect(*service, Node::Kind::string, "\"service\"") || !printable(*service)) return;
    const auto ip = this->address(*address, "\"address\"");
    if (!ip) return;
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
      error(address->at,
            "'" + address->string +
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
    const auto ip = address(node, "a resolver");
    if (!ip) return;
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
      error(node.at,
            quote(node.string) +
                " is not a runtime that agentgate can verify; it knows "
                "\"runsc\" and \"runc\" (what the runtime is, not what the engine calls it)");
      return;
    }
    out_.policy.runtimes.push_back(node.string);
  }

  std::string file_;
  ParseResult& out_;
};

// Each note once, however many entries lead to it.
void note(Compiled& out, std::string text) {
  if (std::find(out.notes.begin(), out.notes.end(), text) == out.notes.end()) {
    out.notes.push_back(std::move(text));
  }
}

std::string revision_of(std::string_view text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  if (EVP_Digest(text.data(), text.size(), digest, &length, EVP_sha256(), nullptr) != 1) return "";
  static constexpr char hex[] = "0123456789abcdef";
  std::string out;
  for (unsigned i = 0; i < 6 && i < length; ++i) {
    out += hex[digest[i] >> 4];
    out += hex[digest[i] & 0xF];
  }
  return out;
}

template <class Address>
using Entries = std::vector<netdriver::AllowEntry<Address>>;

template <class Address>
void add_entries(Entries<Address>& out, const AddressRange<Address>& range,
                 const std::vector<Service>& services) {
  for (const Service& service : services) out.push_back({range, service.protocol, service.ports});
}

const std::vector<Service>& dns_services() {
  static const std::vector<Service> services = {{Protocol::udp, {53, 53}},
                                                {Protocol::tcp, {53, 53}}};
  return services;
}

// One address family of compile(). `ip` picks the family's address out of an IpAddress.
template <class Address>
netdriver::PolicyFamily<Address> compile_family(const Policy& policy, const Resolution& resolution,
                                                const std::vector<AddressRange<Address>>& always,
                                                const std::vector<IpAddress>& host, Compiled& out) {
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
        note(out, rule.name + ": " + resolved.address.to_string() + " is " +
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
    if (range && rule.services.empty()) family.deny.push_back(*range);
  }
  family.deny = merge(std::move(family.deny));
  for (const PrefixRule& rule : policy.deny) {
    const auto range = range_of(rule.prefix);
    if (!range || rule.services.empty()) continue;
    // Where everything is denied, single services need no boxes of their own.
    const auto whole = overlap(*range, family.deny);
    if (whole && whole->first <= range->first && range->last <= whole->last) continue;
    add_entries(deny_services, *range, rule.services);
  }
  family.allow = netdriver::subtract(allow, deny_services);
  family.private_entries = netdriver::subtract(exceptions, deny_services);
  return family;
}

}  // namespace

ParseResult parse(std::string_view text, const std::string& name, const std::string& file) {
  ParseResult out;
  Parser parser(name, file, out);
  if (text.size() > kMaxFileSize) {
    parser.error({}, "larger than 4 MiB");
    return out;
  }
  out.policy.revision = revision_of(text);
  const TreeResult tree = read_tree(text);
  for (const auto& problem : tree.problems) parser.error(problem.at, problem.text);
  if (tree.complete) parser.run(tree.root);
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
                      return std::find(host.begin(), host.end(), resolved.address) == host.end() &&
                             !is_always_denied(resolved.address);
                    });
    if (usable) {
      if (!known->second.error.empty()) {
        note(out, rule.name + ": " + known->second.error + "; its last good addresses are kept");
      }
      continue;
    }
    const std::string why = known == resolution.names.end() || known->second.error.empty()
                                ? "has no usable address"
                                : known->second.error;
    const bool optional = std::all_of(
        policy.names.begin(), policy.names.end(),
        [&](const NameRule& other) { return other.name != rule.name || other.optional; });
    (optional ? out.notes : out.unresolved).push_back(rule.name + ": " + why);
  }
  return out;
}

std::vector<std::string> conflicts_with_host(const Policy& policy,
                                             const std::vector<IpAddress>& host) {
  std::vector<std::string> out;
  const auto check = [&](const PrefixRule& rule) {
    for (const IpAddress& ip : host) {
      if (!covers(rule.prefix, ip)) continue;
      out.push_back(rule.at.file + ":" + std::to_string(rule.at.line) + ":" +
                    std::to_string(rule.at.column) + ": covers " + ip.to_string() +
                    ", an address of this host; the host is never reachable: narrow the entry");
    }
  };
  for (const PrefixRule& rule : policy.prefixes) check(rule);
  for (const PrefixRule& rule : policy.private_rules) check(rule);
  for (const IpAddress& resolver : policy.resolvers) {
    if (std::find(host.begin(), host.end(), resolver) == host.end()) continue;
    out.push_back(
        "policy " + policy.name + ": resolver " + resolver.to_string() +
        " is an address of this host; the host is never reachable: name another resolver");
  }
  return out;
}

namespace {

// Sorted, and ports of one protocol that overlap or touch joined.
std::vector<Service> joined(std::vector<Service> services) {
  std::sort(services.begin(), services.end());
  std::vector<Service> out;
  for (const Service& service : services) {
    if (!out.empty() && out.back().protocol == service.protocol &&
        service.ports.first <= out.back().ports.last + 1) {
      out.back().ports.last = std::max(out.back().ports.last, service.ports.last);
    } else {
      out.push_back(service);
    }
  }
  return out;
}

// What several entries say about one name or prefix.
struct Gathered {
  std::vector<Service> services;
  std::string comment;
  bool optional = true;
  bool every_service = false;

  void add(const std::vector<Service>& more, const std::string& text) {
    if (more.empty()) every_service = true;
    services.insert(services.end(), more.begin(), more.end());
    if (comment.empty()) comment = text;
  }
  [[nodiscard]] nlohmann::ordered_json json(const char* key, const std::string& value) const {
    nlohmann::ordered_json out = {{key, value}};
    if (!every_service) {
      out["services"] = nlohmann::ordered_json::array();
      for (const Service& service : joined(services))
        out["services"].push_back(service.to_string());
    }
    if (!comment.empty()) out["comment"] = comment;
    return out;
  }
};

}  // namespace

std::string to_json(const Policy& policy) {
  using Json = nlohmann::ordered_json;
  Json allow = Json::array();
  Json deny = Json::array();
  Json exceptions = Json::array();
  Json resolvers = Json::array();

  std::map<std::string, Gathered> names;
  for (const NameRule& rule : policy.names) {
    Gathered& name = names[rule.name];
    name.add(rule.services, rule.comment);
    name.optional = name.optional && rule.optional;
  }
  for (const auto& [name, rule] : names) {
    Json entry = rule.json("name", name);
    if (rule.optional) entry["optional"] = true;
    allow.push_back(std::move(entry));
  }
  const auto gather = [](const std::vector<PrefixRule>& rules) {
    std::map<std::variant<Ipv4Prefix, Ipv6Prefix>, Gathered> out;
    for (const PrefixRule& rule : rules) out[rule.prefix].add(rule.services, rule.comment);
    return out;
  };
  for (const auto& [prefix, rule] : gather(policy.prefixes)) {
    allow.push_back(rule.json("cidr", text_of(prefix)));
  }
  for (const auto& [prefix, rule] : gather(policy.deny)) {
    deny.push_back(rule.json("cidr", text_of(prefix)));
  }
  std::set<std::pair<std::string, std::string>> seen;
  for (const PrefixRule& rule : policy.private_rules) {
    const std::string text = text_of(rule.prefix);
    const std::string address = text.substr(0, text.find('/'));
    for (const Service& service : rule.services) {
      if (!seen.emplace(address, service.to_string()).second) continue;
      Json entry = {{"address", address}, {"service", service.to_string()}};
      if (!rule.comment.empty()) entry["comment"] = rule.comment;
      exceptions.push_back(std::move(entry));
    }
  }
  for (const IpAddress& resolver : policy.resolvers) resolvers.push_back(resolver.to_string());
  const Json out = {{"version", 1},
                    {"description", policy.description},
                    {"allow", std::move(allow)},
                    {"deny", std::move(deny)},
                    {"private", std::move(exceptions)},
                    {"resolvers", std::move(resolvers)},
                    {"runtimes", policy.runtimes},
                    {"reject", policy.reject},
                    {"refresh_seconds", policy.refresh.count()},
                    {"grace_seconds", policy.grace.count()},
                    {"accept_host_resolver", policy.accept_host_resolver}};
  return out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string resolv_conf(const Policy& policy) {
  std::string out = "# Written by agentgate when the container was armed.\n";
  for (std::size_t i = 0; i < policy.resolvers.size() && i < kResolversUsed; ++i) {
    out += "nameserver " + policy.resolvers[i].to_string() + "\n";
  }
  return out + "options ndots:1 timeout:2 attempts:2\n";
}

}  // namespace agentgate::policy

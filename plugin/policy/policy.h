// SPDX-License-Identifier: GPL-2.0-or-later
//
// Policies: what a released container may reach.
//
// A policy file (docs/policy.md) is parsed into Policy, checked, resolved through c-ares into
// Resolution, and both together become netdriver's PolicySpec. This folder knows files, JSON and
// DNS; it knows nothing of nftables, Docker or which container uses a policy.
//
// Threading: parse, validate and compile are pure. Resolver may be used from one thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "netdriver/gate.h"
#include "netdriver/types.h"

namespace agentgate::policy {

// A place in a file, for messages: "web.json:12:9: …".
struct Location {
  std::string file;
  unsigned line = 0;    // from 1
  unsigned column = 0;  // from 1, in bytes
};

struct NameRule {
  std::string name;  // lower case, no trailing dot, a host name with at least two labels
  std::vector<Service> services;
  bool optional = false;  // a name that does not resolve does not fail the arm
  std::string comment;
  Location at;
};

struct PrefixRule {
  std::variant<Ipv4Prefix, Ipv6Prefix> prefix;
  std::vector<Service> services;
  std::string comment;
  Location at;
};

struct Policy {
  std::string name;
  std::string description;
  std::vector<NameRule> names;
  std::vector<PrefixRule> prefixes;  // allow
  std::vector<PrefixRule>
      private_rules;                  // exceptions to the always-deny set: one address, one port
  std::vector<PrefixRule> deny;       // services empty: all
  std::vector<IpAddress> resolvers;   // allowed on udp/53 and tcp/53, and written to resolv.conf
  std::vector<std::string> runtimes;  // allowed OCI runtimes, by what they are: "runsc", "runc"
  bool reject = true;
  // Arms although the engine asks DNS servers for the container from the host's network namespace.
  bool accept_host_resolver = false;
  std::chrono::seconds refresh{300};  // resolve again at arm when older than this
  std::chrono::seconds grace{3600};   // an address that rotated out stays allowed this long
  std::string revision;               // first 12 hex digits of the SHA-256 of the file
};

// Parses and validates. Every problem found is reported, not only the first; errors name file,
// line and column and say the mend. An empty vector in `errors` means that `policy` is good.
struct ParseResult {
  Policy policy;
  std::vector<std::string> errors;
  std::vector<std::string> warnings;
};
[[nodiscard]] ParseResult parse(std::string_view text, const std::string& name,
                                const std::string& file);

// The policy that applies when no file exists: the article's two names on tcp/443 and its two
// resolvers. Its name is "default".
[[nodiscard]] const Policy& builtin();

// Loads DIRECTORY/NAME.json. Refused: a file or directory that is not owned by root or that group
// or others can write, a symbolic link, more than 4 MiB. "default" without a file is builtin().
[[nodiscard]] Result<Policy> load(const std::filesystem::path& directory, const std::string& name);

// The names of the policies in a directory, sorted. A directory that is not there has none.
[[nodiscard]] Result<std::vector<std::string>> list(const std::filesystem::path& directory);

struct ResolvedAddress {
  IpAddress address;
  std::chrono::system_clock::time_point last_seen;  // in an answer
  bool operator==(const ResolvedAddress&) const = default;
};

struct ResolvedName {
  std::vector<ResolvedAddress> addresses;             // sorted by address
  std::chrono::system_clock::time_point resolved_at;  // the last attempt, good or bad
  std::chrono::seconds ttl{0};                        // least of the chain
  std::string error;  // of the last attempt; empty when it succeeded
  bool operator==(const ResolvedName&) const = default;
};

// What the names of a policy stand for, with when that was learned.
struct Resolution {
  std::map<std::string, ResolvedName> names;
  bool operator==(const Resolution&) const = default;
};
// For the state directory. from_json refuses what it does not know.
[[nodiscard]] std::string to_json(const Resolution& resolution);
[[nodiscard]] Result<Resolution> resolution_from_json(std::string_view text);

class Resolver {
 public:
  struct Options {
    std::vector<std::string> servers;  // "ADDRESS" or "ADDRESS:PORT"; empty: the host's resolv.conf
    std::chrono::milliseconds timeout{5000};  // for all names together
  };
  explicit Resolver(Options options);
  ~Resolver();
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  // Asks for A and AAAA of all names, 64 names at a time, never /etc/hosts. Names that fail have
  // `error` set and no addresses. Times are whole seconds. Never throws and ends within
  // Options::timeout.
  [[nodiscard]] Resolution resolve(const std::vector<std::string>& names);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Merges a new answer into what was known: an address seen now is kept, one that only rotated out
// is kept until policy.grace after it was last seen, a name that failed keeps its last good
// addresses, a name that left the policy is dropped. At most 1024 addresses of a name, the ones
// seen last.
[[nodiscard]] Resolution merge(const Policy& policy, const Resolution& known,
                               const Resolution& fresh, std::chrono::system_clock::time_point now);

// Whether a name of the policy is missing from `resolution`, is older than policy.refresh, or
// failed and may be tried again: at once when the arm needs it, else after ten seconds.
[[nodiscard]] bool needs_refresh(const Policy& policy, const Resolution& resolution,
                                 std::chrono::system_clock::time_point now);

struct Compiled {
  netdriver::PolicySpec spec;           // normalised
  std::vector<std::string> unresolved;  // required names without a usable address: arm must fail
  std::vector<std::string> notes;  // addresses lost to the always-deny set, optional names without
                                   // an address, names that live on their last good addresses
};
// Policy and resolution to kernel terms. Addresses of names that fall into the always-deny set or
// `host` (the host's own addresses) are left out and noted (DNS rebinding).
[[nodiscard]] Compiled compile(const Policy& policy, const Resolution& resolution,
                               const std::vector<IpAddress>& host);

// Problems that only this host can see: a prefix or private rule that covers one of its addresses.
[[nodiscard]] std::vector<std::string> conflicts_with_host(const Policy& policy,
                                                           const std::vector<IpAddress>& host);

// The policy as a policy file in which nothing is left to defaults and entries for one name or
// prefix are one. It parses, and compiles to the same.
[[nodiscard]] std::string to_json(const Policy& policy);

// The text for a container's resolver file.
[[nodiscard]] std::string resolv_conf(const Policy& policy);

}  // namespace agentgate::policy

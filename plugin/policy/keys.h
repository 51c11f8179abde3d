// SPDX-License-Identifier: GPL-2.0-or-later
//
// The keys of a policy file. docs/policy.md must name each of them (tests/unit/policy checks it).
#pragma once

#include <array>
#include <cstddef>

namespace agentgate::policy {

inline constexpr std::size_t kMaxFileSize = std::size_t{4} << 20;

inline constexpr std::array kPolicyKeys = {
    "version", "description",     "comment",       "allow",
    "deny",    "private",         "resolvers",     "runtimes",
    "reject",  "refresh_seconds", "grace_seconds", "accept_host_resolver"};
inline constexpr std::array kAllowKeys = {"name", "cidr", "services", "optional", "comment"};
inline constexpr std::array kDenyKeys = {"cidr", "services", "comment"};
inline constexpr std::array kPrivateKeys = {"address", "service", "comment"};

}  // namespace agentgate::policy

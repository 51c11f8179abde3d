// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>

#include <nlohmann/json.hpp>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using Clock = std::chrono::system_clock;
using nlohmann::json;

// A name that answers with other addresses each time must not fill the kernel's sets.
constexpr std::size_t kMaxAddresses = 1024;
// A name that fails must not cost every arm the resolver's timeout.
constexpr std::chrono::seconds kRetry{10};

std::int64_t to_seconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
}
Clock::time_point from_seconds(std::int64_t seconds) {
  return Clock::time_point(std::chrono::seconds(seconds));
}

// Whole seconds from 1970 to 2255: what does not overflow the clock's nanoseconds.
bool is_time(const json& value) {
  return value.is_number_integer() && value >= 0 && value <= 9'000'000'000;
}

bool only_keys(const json& object, std::initializer_list<const char*> keys) {
  if (!object.is_object()) return false;
  return std::all_of(object.items().begin(), object.items().end(), [&](const auto& item) {
    return std::find(keys.begin(), keys.end(), item.key()) != keys.end();
  });
}

}  // namespace

std::string to_json(const Resolution& resolution) {
  json names = json::object();
  for (const auto& [name, resolved] : resolution.names) {
    json addresses = json::array();
    for (const auto& address : resolved.addresses) {
      addresses.push_back(
          {{"address", address.address.to_string()}, {"last_seen", to_seconds(address.last_seen)}});
    }
    names[name] = {{"addresses", addresses},
                   {"resolved_at", to_seconds(resolved.resolved_at)},
                   {"ttl", resolved.ttl.count()},
                   {"error", resolved.error}};
  }
  return json({{"version", 1}, {"names", names}})
      .dump(-1, ' ', false, json::error_handler_t::replace);  // a dump that throws stops the daemon
}

Result<Resolution> resolution_from_json(std::string_view text) {
  const auto bad = [](const char* why) { return fail("read resolution", why, EBADMSG); };
  const json root = json::parse(text, nullptr, false);
  if (!only_keys(root, {"version", "names"}) || root.value("version", json()) != 1 ||
      !root.contains("names") || !root["names"].is_object()) {
    return bad("not a version 1 resolution");
  }
  Resolution out;
  for (const auto& [name, value] : root["names"].items()) {
    if (!only_keys(value, {"addresses", "resolved_at", "ttl", "error"}) || value.size() != 4 ||
        !value["addresses"].is_array() || !is_time(value["resolved_at"]) ||
        !is_time(value["ttl"]) || !value["error"].is_string()) {
      return bad("a name is not as it should be");
    }
    ResolvedName& resolved = out.names[name];
    resolved.resolved_at = from_seconds(value["resolved_at"].get<std::int64_t>());
    resolved.ttl = std::chrono::seconds(value["ttl"].get<std::int64_t>());
    resolved.error = value["error"].get<std::string>();
    for (const json& item : value["addresses"]) {
      if (!only_keys(item, {"address", "last_seen"}) || item.size() != 2 ||
          !item["address"].is_string() || !is_time(item["last_seen"])) {
        return bad("an address is not as it should be");
      }
      auto address = IpAddress::parse(item["address"].get<std::string>());
      if (!address) return tl::unexpected(address.error());
      resolved.addresses.push_back({*address, from_seconds(item["last_seen"].get<std::int64_t>())});
    }
  }
  return out;
}

Resolution merge(const Policy& policy, const Resolution& known, const Resolution& fresh,
                 Clock::time_point now) {
  const auto by_address = [](const ResolvedAddress& a, const ResolvedAddress& b) {
    return a.address < b.address;
  };
  Resolution out;
  for (const NameRule& rule : policy.names) {
    if (out.names.count(rule.name) != 0) continue;
    const auto old = known.names.find(rule.name);
    const auto answer = fresh.names.find(rule.name);
    if (answer == fresh.names.end()) {
      if (old != known.names.end()) out.names[rule.name] = old->second;
      continue;
    }
    ResolvedName merged = answer->second;
    std::sort(merged.addresses.begin(), merged.addresses.end(), by_address);
    if (old != known.names.end()) {
      const bool failed = !merged.error.empty();
      if (failed) merged.ttl = old->second.ttl;
      const std::size_t seen_now = merged.addresses.size();
      for (ResolvedAddress address : old->second.addresses) {
        // The clock went back: what was seen in the future was seen now, or it stays for ever.
        address.last_seen = std::min(address.last_seen, now);
        const auto end = merged.addresses.begin() + static_cast<std::ptrdiff_t>(seen_now);
        const bool again = std::binary_search(merged.addresses.begin(), end, address, by_address);
        if (!again && (failed || now - address.last_seen <= policy.grace)) {
          merged.addresses.push_back(address);
        }
      }
    }
    if (merged.addresses.size() > kMaxAddresses) {
      std::stable_sort(merged.addresses.begin(), merged.addresses.end(),
                       [](const auto& a, const auto& b) { return a.last_seen > b.last_seen; });
      merged.addresses.resize(kMaxAddresses);
    }
    std::sort(merged.addresses.begin(), merged.addresses.end(), by_address);
    out.names[rule.name] = std::move(merged);
  }
  return out;
}

bool needs_refresh(const Policy& policy, const Resolution& resolution, Clock::time_point now) {
  return std::any_of(policy.names.begin(), policy.names.end(), [&](const NameRule& rule) {
    const auto known = resolution.names.find(rule.name);
    if (known == resolution.names.end()) return true;
    const ResolvedName& name = known->second;
    if (name.resolved_at > now) return true;  // the clock went back
    if (name.error.empty()) return now - name.resolved_at > policy.refresh;
    if (name.addresses.empty() && !rule.optional) return true;
    return now - name.resolved_at > std::min(policy.refresh, kRetry);
  });
}

}  // namespace agentgate::policy

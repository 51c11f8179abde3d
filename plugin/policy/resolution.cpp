// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>

#include <nlohmann/json.hpp>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using Clock = std::chrono::system_clock;
using nlohmann::json;

std::int64_t to_seconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
}
Clock::time_point from_seconds(std::int64_t seconds) {
  return Clock::time_point(std::chrono::seconds(seconds));
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
  return json({{"version", 1}, {"names", names}}).dump();
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
        !value["addresses"].is_array() || !value["resolved_at"].is_number_integer() ||
        !value["ttl"].is_number_integer() || !value["error"].is_string()) {
      return bad("a name is not as it should be");
    }
    ResolvedName& resolved = out.names[name];
    resolved.resolved_at = from_seconds(value["resolved_at"].get<std::int64_t>());
    resolved.ttl = std::chrono::seconds(value["ttl"].get<std::int64_t>());
    resolved.error = value["error"].get<std::string>();
    for (const json& item : value["addresses"]) {
      if (!only_keys(item, {"address", "last_seen"}) || item.size() != 2 ||
          !item["address"].is_string() || !item["last_seen"].is_number_integer()) {
        return bad("an address is not as it should be");
      }
      auto address = IpAddress::parse(item["address"].get<std::string>());
      if (!address) return tl::unexpected(address.error());
      resolved.addresses.push_back(
          {*address, from_seconds(item["last_seen"].get<std::int64_t>())});
    }
  }
  return out;
}

Resolution merge(const Policy& policy, const Resolution& known, const Resolution& fresh,
                 Clock::time_point now) {
  Resolution out;
  for (const NameRule& rule : policy.names) {
    if (out.names.count(rule.name) != 0) continue;
    const auto old = known.names.find(rule.name);
    const auto answer = fresh.names.find(rule.name);
    if (answer == fresh.names.end() || !answer->second.error.empty()) {
      // It failed: what was good stays, and says why it is not newer.
      if (old != known.names.end()) out.names[rule.name] = old->second;
      if (answer != fresh.names.end()) out.names[rule.name].error = answer->second.error;
      continue;
    }
    ResolvedName merged = answer->second;
    if (old != known.names.end()) {
      for (const ResolvedAddress& address : old->second.addresses) {
        const bool seen_now = std::any_of(
            merged.addresses.begin(), merged.addresses.end(),
            [&](const ResolvedAddress& other) { return other.address == address.address; });
        // A clock that went back must not keep an address for ever.
        const bool within_grace = address.last_seen <= now && now - address.last_seen <= policy.grace;
        if (!seen_now && within_grace) merged.addresses.push_back(address);
      }
      std::sort(merged.addresses.begin(), merged.addresses.end(),
                [](const auto& a, const auto& b) { return a.address < b.address; });
    }
    out.names[rule.name] = std::move(merged);
  }
  return out;
}

bool needs_refresh(const Policy& policy, const Resolution& resolution, Clock::time_point now) {
  return std::any_of(policy.names.begin(), policy.names.end(), [&](const NameRule& rule) {
    const auto known = resolution.names.find(rule.name);
    return known == resolution.names.end() || !known->second.error.empty() ||
           known->second.resolved_at > now || now - known->second.resolved_at > policy.refresh;
  });
}

}  // namespace agentgate::policy

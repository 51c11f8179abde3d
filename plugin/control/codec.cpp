// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/control/codec.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>

#include "plugin/model.h"

namespace agentgate::control {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::string dump(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

// Somebody else's text in a message of ours: one line, not too long.
std::string in_quotes(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 80)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (text.size() > 80 ? "…'" : "'");
}

tl::unexpected<BadRequest> bad(std::string field, std::string text) {
  return tl::unexpected(BadRequest{std::move(field), std::move(text)});
}

// An object whose values are strings and whose keys are among `known`, each at most once.
Decoded<json> parse_strict(std::string_view body, std::initializer_list<const char*> known) {
  std::set<std::string> seen;
  std::string twice;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!seen.insert(key).second) twice = key;
    }
    return true;
  };
  json out;
  try {
    out = json::parse(body, watch, false);
  } catch (const std::exception&) {
    return bad("body", "cannot be read");
  }
  if (out.is_discarded() || !out.is_object()) {
    return bad("body", "must be a JSON object, for example {\"container\": \"a1\"}");
  }
  if (!twice.empty()) return bad(in_quotes(twice), "is there twice");
  std::string list;
  for (const char* key : known) list += (list.empty() ? "" : ", ") + std::string(key);
  for (const auto& [key, value] : out.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return bad(in_quotes(key), "is not known here; known are: " + list);
    }
    if (!value.is_string()) return bad(key, "must be a string");
  }
  return out;
}

// Docker's rule for names; ids fit it as well.
Decoded<std::string> container_of(const json& object) {
  const auto at = object.find("container");
  if (at == object.end()) return bad("container", "is missing: the name or id of a container");
  const auto& text = at->get_ref<const std::string&>();
  const auto alnum = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  const bool good = !text.empty() && text.size() <= 255 && alnum(text[0]) &&
                    std::all_of(text.begin(), text.end(), [&](char c) {
                      return alnum(c) || c == '_' || c == '.' || c == '-';
                    });
  if (!good) {
    return bad("container", in_quotes(text) +
                                " is not the name or id of a container (letters, "
                                "digits, '_', '.', '-')");
  }
  return text;
}

Decoded<std::optional<std::string>> policy_of(const json& object) {
  const auto at = object.find("policy");
  if (at == object.end()) return std::nullopt;
  const auto& text = at->get_ref<const std::string&>();
  if (const Status name = check_policy_name(text); !name) return bad("policy", name.error().text);
  return text;
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(value->to_string()) : ordered_json(nullptr);
}

ordered_json encode_network(const NetworkRecord& network) {
  return {{"id", network.id.str()},
          {"bridge", bridge_name(network.id).str()},
          {"gateway4", or_null(network.gateway4)},
          {"gateway6", or_null(network.gateway6)},
          {"policy", network.policy},
          {"mtu", network.mtu},
          {"masquerade", network.masquerade}};
}

ordered_json encode_endpoint(const EndpointRecord& endpoint) {
  ordered_json release = nullptr;
  if (endpoint.release) {
    release = {{"container_id", endpoint.release->container_id},
               {"container_name", endpoint.release->container_name},
               {"pid", endpoint.release->process.pid},
               {"policy", endpoint.release->policy},
               {"released_at", endpoint.release->released_at}};
  }
  return {{"id", endpoint.id.str()},
          {"network", endpoint.network.str()},
          {"port", port_name(endpoint.id).str()},
          {"address4", or_null(endpoint.address4)},
          {"address6", or_null(endpoint.address6)},
          {"mac", endpoint.mac.to_string()},
          {"policy", endpoint.policy},
          {"joined", !endpoint.sandbox_key.empty()},
          {"state", endpoint.release ? "released" : "closed"},
          {"release", std::move(release)}};
}

std::size_t released_in(const host::Snapshot& snapshot) {
  return static_cast<std::size_t>(
      std::count_if(snapshot.endpoints.begin(), snapshot.endpoints.end(),
                    [](const EndpointRecord& endpoint) { return endpoint.release.has_value(); }));
}

}  // namespace

Decoded<arm::ArmRequest> decode_arm(std::string_view body) {
  const auto object = parse_strict(body, {"container", "policy"});
  if (!object) return tl::unexpected(object.error());
  const auto container = container_of(*object);
  if (!container) return tl::unexpected(container.error());
  const auto policy = policy_of(*object);
  if (!policy) return tl::unexpected(policy.error());
  return arm::ArmRequest{*container, *policy, std::nullopt};
}

Decoded<arm::ArmRequest> decode_precheck(std::string_view body) {
  const auto object = parse_strict(body, {"container", "policy", "network"});
  if (!object) return tl::unexpected(object.error());
  const auto container = container_of(*object);
  if (!container) return tl::unexpected(container.error());
  const auto policy = policy_of(*object);
  if (!policy) return tl::unexpected(policy.error());
  arm::ArmRequest out{*container, *policy, std::nullopt};
  if (const auto network = object->find("network"); network != object->end()) {
    if (!network->is_string() || !NetworkId::parse(network->get<std::string>())) {
      return bad("network", "the id of a network, 64 hexadecimal digits");
    }
    out.network = network->get<std::string>();
  }
  return out;
}

Decoded<std::string> decode_container(std::string_view body) {
  const auto object = parse_strict(body, {"container"});
  if (!object) return tl::unexpected(object.error());
  return container_of(*object);
}

Decoded<PolicyRequest> decode_refresh(std::string_view body) {
  if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) return PolicyRequest{};
  const auto object = parse_strict(body, {"policy"});
  if (!object) return tl::unexpected(object.error());
  const auto policy = policy_of(*object);
  if (!policy) return tl::unexpected(policy.error());
  return PolicyRequest{*policy};
}

std::string encode(const std::vector<arm::Refreshed>& refreshed) {
  ordered_json policies = ordered_json::array();
  bool ok = true;
  for (const arm::Refreshed& one : refreshed) {
    ok = ok && one.ok;
    policies.push_back({{"policy", one.policy},
                        {"revision", one.revision},
                        {"ok", one.ok},
                        {"error", one.error},
                        {"added", one.added},
                        {"removed", one.removed},
                        {"kept", one.kept},
                        {"ports", one.ports}});
  }
  return dump({{"version", 1},
               {"operation", "refresh"},
               {"exit", ok ? 0 : 1},
               {"policies", std::move(policies)}});
}

std::string encode_status(const host::Snapshot& snapshot, const arm::EngineGuardStatus& guard) {
  ordered_json networks = ordered_json::array();
  for (const auto& network : snapshot.networks) networks.push_back(encode_network(network));
  ordered_json endpoints = ordered_json::array();
  for (const auto& endpoint : snapshot.endpoints) endpoints.push_back(encode_endpoint(endpoint));
  return dump({{"version", 1},
               {"ready", snapshot.ready},
               {"failure", snapshot.failure},
               {"features",
                {{"owner", snapshot.features.owner},
                 {"owner_persist", snapshot.features.owner_persist},
                 {"bridge_locked", snapshot.features.bridge_locked},
                 {"netdev_egress", snapshot.features.netdev_egress}}},
               {"networks", std::move(networks)},
               {"endpoints", std::move(endpoints)},
               {"guard",
                {{"looks", snapshot.guard.looks},
                 {"repairs", snapshot.guard.repairs},
                 {"failures", snapshot.guard.failures},
                 {"closed", snapshot.guard.closed},
                 {"lost", snapshot.guard.lost}}},
               {"engine_guard",
                {{"connected", guard.connected},
                 {"since", guard.since},
                 {"reason", guard.reason},
                 {"losses", guard.losses},
                 {"closed", guard.closed}}},
               {"incidents", snapshot.incidents}});
}

bool is_healthy(const host::Snapshot& snapshot) {
  return snapshot.ready && snapshot.failure.empty();
}

std::string encode_health(const host::Snapshot& snapshot, const Totals& totals,
                          const arm::EngineGuardStatus& guard) {
  ordered_json reasons = ordered_json::array();
  if (!snapshot.failure.empty()) {
    reasons.push_back(snapshot.failure);
  } else if (!snapshot.ready) {
    reasons.push_back("starting: the state is being restored");
  }
  return dump({{"version", 1},
               {"healthy", is_healthy(snapshot)},
               {"reasons", std::move(reasons)},
               {"counters",
                {{"networks", snapshot.networks.size()},
                 {"endpoints", snapshot.endpoints.size()},
                 {"endpoints_released", released_in(snapshot)},
                 {"incidents", snapshot.incidents.size()},
                 {"repairs", snapshot.guard.repairs},
                 {"repairs_failed", snapshot.guard.failures},
                 {"armed", totals.armed},
                 {"disarmed", totals.disarmed},
                 {"refused", totals.refused},
                 {"undone", totals.undone},
                 {"inconsistent", totals.inconsistent},
                 {"engine_guard_losses", guard.losses},
                 {"engine_guard_closed", guard.closed}}}});
}

std::string encode(const std::vector<arm::Finding>& findings) {
  ordered_json list = ordered_json::array();
  bool missing = false;
  for (const arm::Finding& finding : findings) {
    missing = missing || finding.outcome == "missing";
    list.push_back({{"check", finding.check},
                    {"outcome", finding.outcome},
                    {"seen", finding.seen},
                    {"mend", finding.mend}});
  }
  return dump({{"version", 1}, {"exit", missing ? 1 : 0}, {"findings", std::move(list)}});
}

std::string encode_version() { return dump({{"version", AGENTGATE_VERSION}, {"api", 1}}); }

std::string encode_error(const BadRequest& error) {
  return dump({{"error", {{"field", error.field}, {"text", error.text}}}});
}

}  // namespace agentgate::control

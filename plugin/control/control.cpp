// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/control/control.h"

#include <algorithm>
#include <optional>

#include <nlohmann/json.hpp>

namespace agentgate::control {
namespace {

using nlohmann::ordered_json;

http::Response answer(const ordered_json& body, int status = 200) {
  return {status, body.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n",
          "application/json"};
}

http::Response bad(int status, const std::string& field, const std::string& text) {
  return answer({{"error", {{"field", field}, {"text", text}}}}, status);
}

// The string members of a request; anything else in it is an error.
struct Fields {
  ordered_json object;
  std::optional<http::Response> error;

  Fields(const std::string& body, std::initializer_list<const char*> known) {
    object = body.empty() ? ordered_json::object() : ordered_json::parse(body, nullptr, false);
    if (!object.is_object()) {
      error = bad(400, "", "the body must be a JSON object");
      return;
    }
    for (const auto& [key, value] : object.items()) {
      if (std::find_if(known.begin(), known.end(),
                       [&, name = key](const char* k) { return name == k; }) == known.end()) {
        std::string list;
        for (const char* k : known) list += (list.empty() ? "" : ", ") + std::string(k);
        error = bad(400, key, "unknown field; known are: " + list);
        return;
      }
      if (!value.is_string() || value.get<std::string>().empty()) {
        error = bad(400, key, "must be a string that is not empty");
        return;
      }
    }
  }
  [[nodiscard]] std::optional<std::string> text(const char* key) const {
    if (!object.contains(key)) return std::nullopt;
    return object[key].get<std::string>();
  }
  [[nodiscard]] std::string container() {
    const auto name = text("container");
    if (!name) error = bad(400, "container", "is missing; give the container's name or id");
    return name.value_or("");
  }
};

http::Response report(const arm::Report& report) {
  return {200, arm::to_json(report) + "\n", "application/json"};
}

template <class T>
ordered_json text_or_null(const std::optional<T>& value) {
  return value ? ordered_json(value->to_string()) : ordered_json();
}

}  // namespace

struct Control::Route {
  const char* method;
  const char* path;
  http::Response (Control::*handler)(const std::string& body);
};

const std::vector<Control::Route>& Control::table() {
  static const std::vector<Route> routes = {
      {"POST", "/v1/arm", &Control::arm},      {"POST", "/v1/disarm", &Control::disarm},
      {"POST", "/v1/check", &Control::check},  {"POST", "/v1/refresh", &Control::refresh},
      {"GET", "/v1/status", &Control::status}, {"GET", "/v1/version", &Control::version},
      {"GET", "/v1/health", &Control::health}, {"GET", "/v1/doctor", &Control::doctor}};
  return routes;
}

std::vector<std::pair<std::string, std::string>> Control::routes() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Route& route : table()) out.emplace_back(route.method, route.path);
  return out;
}

http::Response Control::handle(const http::Request& request) {
  bool path_known = false;
  for (const Route& route : table()) {
    if (request.path != route.path) continue;
    path_known = true;
    if (request.method == route.method) return (this->*route.handler)(request.body);
  }
  if (path_known) return bad(405, "", "method " + request.method + " is not for this path");
  return bad(404, "", "there is no " + request.path + "; see docs/api.md");
}

void Control::count(const arm::Report& report) {
  switch (report.outcome) {
    case arm::Outcome::released:
      ++released_;
      break;
    case arm::Outcome::closed:
      ++closed_;
      break;
    case arm::Outcome::refused:
      ++refused_;
      break;
    case arm::Outcome::undone:
      ++undone_;
      break;
    case arm::Outcome::inconsistent:
      ++inconsistent_;
      break;
  }
}

http::Response Control::arm(const std::string& body) {
  Fields fields(body, {"container", "policy"});
  if (fields.error) return *fields.error;
  const std::string container = fields.container();
  if (fields.error) return *fields.error;
  const arm::Report result = service_.arm({container, fields.text("policy")});
  count(result);
  return report(result);
}

http::Response Control::disarm(const std::string& body) {
  Fields fields(body, {"container"});
  if (fields.error) return *fields.error;
  const std::string container = fields.container();
  if (fields.error) return *fields.error;
  const arm::Report result = service_.disarm(container);
  count(result);
  return report(result);
}

http::Response Control::check(const std::string& body) {
  Fields fields(body, {"container"});
  if (fields.error) return *fields.error;
  const std::string container = fields.container();
  if (fields.error) return *fields.error;
  const arm::Report result = service_.check(container);
  if (result.outcome == arm::Outcome::inconsistent) ++inconsistent_;
  return report(result);
}

http::Response Control::refresh(const std::string& body) {
  Fields fields(body, {"policy"});
  if (fields.error) return *fields.error;
  ordered_json policies = ordered_json::array();
  bool ok = true;
  for (const arm::Refreshed& one : service_.refresh(fields.text("policy"))) {
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
  return answer({{"version", 1}, {"exit", ok ? 0 : 1}, {"policies", policies}});
}

http::Response Control::status(const std::string& /*body*/) {
  const host::Snapshot snapshot = service_.status();
  ordered_json networks = ordered_json::array();
  for (const NetworkRecord& network : snapshot.networks) {
    networks.push_back({{"id", network.id.str()},
                        {"bridge", bridge_name(network.id).str()},
                        {"gateway4", text_or_null(network.gateway4)},
                        {"gateway6", text_or_null(network.gateway6)},
                        {"policy", network.policy},
                        {"mtu", network.mtu},
                        {"masquerade", network.masquerade}});
  }
  ordered_json endpoints = ordered_json::array();
  for (const EndpointRecord& endpoint : snapshot.endpoints) {
    ordered_json release;
    if (endpoint.release) {
      release = {{"container_id", endpoint.release->container_id},
                 {"container_name", endpoint.release->container_name},
                 {"policy", endpoint.release->policy},
                 {"released_at", endpoint.release->released_at}};
    }
    endpoints.push_back({{"id", endpoint.id.str()},
                         {"network", endpoint.network.str()},
                         {"port", port_name(endpoint.id).str()},
                         {"mac", endpoint.mac.to_string()},
                         {"address4", text_or_null(endpoint.address4)},
                         {"address6", text_or_null(endpoint.address6)},
                         {"state", endpoint.release ? "released" : "closed"},
                         {"release", release}});
  }
  return answer({{"version", 1},
                 {"ready", snapshot.ready},
                 {"failure", snapshot.failure},
                 {"kernel",
                  {{"owner", snapshot.features.owner},
                   {"owner_persist", snapshot.features.owner_persist},
                   {"netdev_egress", snapshot.features.netdev_egress}}},
                 {"networks", networks},
                 {"endpoints", endpoints},
                 {"incidents", snapshot.incidents}});
}

http::Response Control::version(const std::string& /*body*/) {
  return answer({{"version", AGENTGATE_VERSION}, {"api", 1}});
}

http::Response Control::health(const std::string& /*body*/) {
  const host::Snapshot snapshot = service_.status();
  ordered_json reasons = ordered_json::array();
  if (!snapshot.ready) reasons.push_back(snapshot.failure.empty() ? "starting" : snapshot.failure);
  if (undone_ != 0) reasons.push_back("a release had to be undone; see the audit file");
  return answer({{"healthy", reasons.empty()},
                 {"reasons", reasons},
                 {"counters",
                  {{"released", released_.load()},
                   {"refused", refused_.load()},
                   {"undone", undone_.load()},
                   {"closed", closed_.load()},
                   {"inconsistent", inconsistent_.load()},
                   {"incidents", snapshot.incidents.size()}}}});
}

http::Response Control::doctor(const std::string& /*body*/) {
  ordered_json findings = ordered_json::array();
  bool ok = true;
  for (const arm::Finding& finding : service_.doctor()) {
    ok = ok && finding.outcome != "missing";
    findings.push_back({{"check", finding.check},
                        {"outcome", finding.outcome},
                        {"seen", finding.seen},
                        {"mend", finding.mend}});
  }
  return answer({{"version", 1}, {"exit", ok ? 0 : 1}, {"findings", findings}});
}

}  // namespace agentgate::control

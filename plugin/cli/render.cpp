// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/render.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

namespace agentgate::cli {
namespace {

using nlohmann::json;

bool steers(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// The text may come from a container's name or a DNS answer: nothing in it may steer a terminal.
std::string printable(std::string text) {
  std::replace_if(text.begin(), text.end(), steers, ' ');
  return text;
}

std::string text_of(const json& object, const char* key) {
  if (!object.is_object()) return {};
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return {};
  return printable(at->is_string() ? at->get<std::string>()
                                   : at->dump(-1, ' ', false, json::error_handler_t::replace));
}

const json& list_of(const json& object, const char* key) {
  static const json none = json::array();
  if (!object.is_object()) return none;
  const auto at = object.find(key);
  return at != object.end() && at->is_array() ? *at : none;
}

std::string milliseconds_of(const json& object) {
  const auto at = object.is_object() ? object.find("ms") : object.end();
  if (at == object.end() || !at->is_number()) return {};
  char text[40];
  std::snprintf(text, sizeof text, "%.1f ms", at->get<double>());
  return text;
}

// Columns as wide as their widest cell; the last one is not padded.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += " " + row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 1, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string first_twelve(const std::string& id) { return id.substr(0, 12); }

std::string indented(const json& list, const std::string& prefix) {
  std::string out;
  for (const json& entry : list) {
    if (entry.is_string()) out += "  " + prefix + printable(entry.get<std::string>()) + "\n";
  }
  return out;
}

}  // namespace

std::string printable_lines(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return steers(c) && c != '\n' && c != '\t'; }, ' ');
  return text;
}

std::string render_report(const json& report) {
  const std::string outcome = text_of(report, "outcome");
  const std::string policy = text_of(report, "policy");
  std::string out = text_of(report, "container") + ": " + outcome;
  if (outcome == "released" && !policy.empty()) {
    out += " to policy " + policy;
    const std::string revision = text_of(report, "policy_revision");
    if (!revision.empty()) out += " (" + revision + ")";
  }
  if (text_of(report, "code") == "GATED_UNARMED") out += ", still closed (GATED_UNARMED)";
  if (outcome == "undone") out += ", closed again";
  const std::string reason = text_of(report, "reason");
  if (!reason.empty()) out += ": " + reason;
  const std::string took = milliseconds_of(report);
  if (!took.empty()) out += " [" + took + "]";
  out += "\n";
  std::vector<std::vector<std::string>> rows;
  for (const json& step : list_of(report, "steps")) {
    rows.push_back({text_of(step, "step"), text_of(step, "outcome"), milliseconds_of(step),
                    text_of(step, "name"), text_of(step, "evidence")});
  }
  out += table(rows);
  out += indented(list_of(report, "differences"), "difference: ");
  out += indented(list_of(report, "notes"), "note: ");
  return out;
}

std::string render_refresh(const json& answer) {
  const json& policies = list_of(answer, "policies");
  if (policies.empty()) return "no policy is in use\n";
  std::string out;
  for (const json& one : policies) {
    out += text_of(one, "policy") + " (" + text_of(one, "revision") + "): ";
    out += one.is_object() && one.value("ok", json(false)) == true
               ? "refreshed for " + text_of(one, "ports") + " ports\n"
               : "failed: " + text_of(one, "error") + "\n";
    out += indented(list_of(one, "added"), "+ ");
    out += indented(list_of(one, "removed"), "- ");
    out += indented(list_of(one, "kept"), "= ");
  }
  return out;
}

std::string render_status(const json& status) {
  std::string out;
  const std::string failure = text_of(status, "failure");
  if (!failure.empty()) {
    out += "not ready: " + failure + "\n";
  } else if (text_of(status, "ready") != "true") {
    out += "not ready: the state is still being restored\n";
  }
  const json guard = status.is_object() ? status.value("engine_guard", json()) : json();
  if (text_of(guard, "connected") == "true") {
    out += "engine guard: connected since " + text_of(guard, "since") + "\n";
  } else if (guard.is_object()) {
    out += "engine guard: NOT CONNECTED to the engine's events, releases are not watched: " +
           text_of(guard, "reason") + "\n";
  }
  out += "networks\n";
  std::vector<std::vector<std::string>> rows{
      {"NETWORK", "BRIDGE", "GATEWAY", "GATEWAY6", "POLICY"}};
  for (const json& one : list_of(status, "networks")) {
    rows.push_back({first_twelve(text_of(one, "id")), text_of(one, "bridge"),
                    text_of(one, "gateway4"), text_of(one, "gateway6"), text_of(one, "policy")});
  }
  out += table(rows) + "endpoints\n";
  rows = {{"PORT", "STATE", "ADDRESS", "ADDRESS6", "POLICY", "CONTAINER"}};
  for (const json& one : list_of(status, "endpoints")) {
    const json release = one.is_object() ? one.value("release", json()) : json();
    const std::string released_to = text_of(release, "policy");
    rows.push_back({text_of(one, "port"), text_of(one, "state"), text_of(one, "address4"),
                    text_of(one, "address6"),
                    released_to.empty() ? text_of(one, "policy") : released_to,
                    text_of(release, "container_name")});
  }
  out += table(rows);
  if (!list_of(status, "incidents").empty()) {
    out += "incidents\n" + indented(list_of(status, "incidents"), "");
  }
  return out;
}

std::string render_health(const json& health) {
  if (text_of(health, "healthy") == "true") return "healthy\n";
  return "not healthy\n" + indented(list_of(health, "reasons"), "");
}

std::string render_doctor(const json& doctor) {
  std::vector<std::vector<std::string>> rows;
  for (const json& one : list_of(doctor, "findings")) {
    const std::string mend = text_of(one, "mend");
    rows.push_back({text_of(one, "outcome"), text_of(one, "check"),
                    text_of(one, "seen") + (mend.empty() ? "" : "; " + mend)});
  }
  return table(rows);
}

}  // namespace agentgate::cli

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/report.h"

#include <cmath>

#include <nlohmann/json.hpp>

namespace agentgate::arm {

int exit_code(Outcome outcome) {
  switch (outcome) {
    case Outcome::released:
    case Outcome::closed:
    case Outcome::repaired:
      return 0;
    case Outcome::refused:
      return 1;
    case Outcome::undone:
      return 2;
    case Outcome::inconsistent:
      return 3;
  }
  return 1;
}

const char* to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::released:
      return "released";
    case Outcome::closed:
      return "closed";
    case Outcome::refused:
      return "refused";
    case Outcome::undone:
      return "undone";
    case Outcome::inconsistent:
      return "inconsistent";
    case Outcome::repaired:
      return "repaired";
  }
  return "refused";
}

const char* to_string(StepOutcome outcome) {
  switch (outcome) {
    case StepOutcome::ok:
      return "ok";
    case StepOutcome::failed:
      return "failed";
    case StepOutcome::skipped:
      return "skipped";
  }
  return "skipped";
}

std::string to_json(const Report& report, bool pretty) {
  using nlohmann::ordered_json;
  const auto rounded = [](double milliseconds) { return std::round(milliseconds * 1000) / 1000; };
  ordered_json steps = ordered_json::array();
  for (const Step& step : report.steps) {
    steps.push_back({{"step", step.number},
                     {"phase", step.phase},
                     {"name", step.name},
                     {"outcome", to_string(step.outcome)},
                     {"evidence", step.evidence},
                     {"ms", rounded(step.milliseconds)}});
  }
  const bool unarmed = report.operation == "arm" && report.outcome == Outcome::refused;
  const ordered_json root = {{"version", 1},
                             {"operation", report.operation},
                             {"container", report.container},
                             {"container_id", report.container_id},
                             {"container_name", report.container_name},
                             {"network_id", report.network_id},
                             {"endpoint_id", report.endpoint_id},
                             {"port", report.port},
                             {"policy", report.policy},
                             {"policy_revision", report.policy_revision},
                             {"outcome", to_string(report.outcome)},
                             {"code", unarmed ? "GATED_UNARMED" : ""},
                             {"exit", exit_code(report.outcome)},
                             {"reason", report.reason},
                             {"started_at", report.started_at},
                             {"ms", rounded(report.milliseconds)},
                             {"steps", steps},
                             {"differences", report.differences},
                             {"notes", report.notes}};
  return root.dump(pretty ? 2 : -1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace agentgate::arm

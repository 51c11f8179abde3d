// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/control/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

namespace agentgate::control {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

using Labelled = std::vector<std::pair<std::string, std::uint64_t>>;

ClientMetric value(MetricType type, std::uint64_t number) {
  ClientMetric out;
  (type == MetricType::Counter ? out.counter.value : out.gauge.value) = static_cast<double>(number);
  return out;
}

MetricFamily family(MetricType type, std::string name, std::string help, std::uint64_t number) {
  return {"agentgate_" + std::move(name), std::move(help), type, {value(type, number)}};
}

MetricFamily family(MetricType type, std::string name, std::string help, const std::string& label,
                    const Labelled& numbers) {
  MetricFamily out{"agentgate_" + std::move(name), std::move(help), type, {}};
  for (const auto& [text, number] : numbers) {
    out.metric.push_back(value(type, number));
    out.metric.back().label.push_back({label, text});
  }
  return out;
}

}  // namespace

std::string encode_metrics(const host::Snapshot& snapshot, const Totals& totals,
                           const arm::EngineGuardStatus& guard) {
  const auto released = static_cast<std::uint64_t>(
      std::count_if(snapshot.endpoints.begin(), snapshot.endpoints.end(),
                    [](const EndpointRecord& one) { return one.release.has_value(); }));
  constexpr auto counter = MetricType::Counter;
  constexpr auto gauge = MetricType::Gauge;
  const std::vector<MetricFamily> families = {
      family(gauge, "healthy", "1 if the daemon is ready, as /v1/health says",
             is_healthy(snapshot) ? 1 : 0),
      family(gauge, "networks", "Networks of the driver", snapshot.networks.size()),
      family(gauge, "ports", "Ports by what the record says", "state",
             {{"closed", snapshot.endpoints.size() - released}, {"released", released}}),
      family(gauge, "incidents", "Incidents that /v1/status lists", snapshot.incidents.size()),
      family(counter, "operations_total", "Operations by their outcome", "outcome",
             {{"armed", totals.armed},
              {"disarmed", totals.disarmed},
              {"refused", totals.refused},
              {"undone", totals.undone},
              {"inconsistent", totals.inconsistent}}),
      family(counter, "guard_looks_total", "Looks at the kernel's state after its notifications",
             snapshot.guard.looks),
      family(counter, "guard_repairs_total", "Changes of others that were put back",
             snapshot.guard.repairs),
      family(counter, "guard_repairs_failed_total",
             "Changes of others that could not be put back at once", snapshot.guard.failures),
      family(counter, "guard_closed_total", "Ports closed or lost by a change of others",
             snapshot.guard.closed),
      family(counter, "guard_notifications_lost_total",
             "Times that the kernel threw notifications away", snapshot.guard.lost),
      family(gauge, "engine_guard_connected", "1 while the engine's events are listened to",
             guard.connected ? 1 : 0),
      family(counter, "engine_guard_losses_total", "Times that the engine's events were lost",
             guard.losses),
      family(counter, "engine_guard_closed_total", "Ports closed since a premise did not hold",
             guard.closed)};
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return std::move(out).str();
}

}  // namespace agentgate::control

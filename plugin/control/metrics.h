// SPDX-License-Identifier: GPL-2.0-or-later
//
// What a monitoring system reads: the counters of /v1/health in Prometheus' text format (0.0.4),
// names and units after its conventions. No label holds what a container chose.
// Threading: any thread.
#pragma once

#include <string>

#include "plugin/control/codec.h"

namespace agentgate::control {

inline constexpr const char* kMetricsType = "text/plain; version=0.0.4; charset=utf-8";

[[nodiscard]] std::string encode_metrics(const host::Snapshot& snapshot, const Totals& totals,
                                         const arm::EngineGuardStatus& guard);

}  // namespace agentgate::control

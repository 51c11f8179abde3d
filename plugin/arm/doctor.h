// SPDX-License-Identifier: GPL-2.0-or-later
//
// What is missing on this host and how to mend it. Reads only.
#pragma once

#include <vector>

#include "plugin/arm/pipeline.h"

namespace agentgate::arm {

[[nodiscard]] std::vector<Finding> examine(const Options& options, host::Ports& ports,
                                           engine::Api& engine, const EngineGuardStatus& guard);

}  // namespace agentgate::arm

// SPDX-License-Identifier: GPL-2.0-or-later
//
// The JSON of the control API (docs/api.md, docs/openapi.json), both ways.
// Pure functions, any thread, never throw. Keys are a contract: they are added, never renamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "netdriver/error.h"
#include "plugin/arm/service.h"

namespace agentgate::control {

// A request that cannot be done as it stands: the field, and the text with the mend.
struct BadRequest {
  std::string field;
  std::string text;
};
template <class T>
using Decoded = tl::expected<T, BadRequest>;

struct PolicyRequest {
  std::optional<std::string> policy;
};

// Outcomes since the daemon started.
struct Totals {
  std::uint64_t armed = 0;
  std::uint64_t disarmed = 0;
  std::uint64_t refused = 0;
  std::uint64_t undone = 0;
  std::uint64_t inconsistent = 0;
};

// {"container": NAME, "policy"?: NAME}
[[nodiscard]] Decoded<arm::ArmRequest> decode_arm(std::string_view body);
// {"container": NAME, "policy"?: NAME, "network"?: ID}
[[nodiscard]] Decoded<arm::ArmRequest> decode_precheck(std::string_view body);
// {"container": NAME}
[[nodiscard]] Decoded<std::string> decode_container(std::string_view body);
// {"policy"?: NAME}; nothing at all is {}.
[[nodiscard]] Decoded<PolicyRequest> decode_refresh(std::string_view body);

[[nodiscard]] std::string encode(const std::vector<arm::Refreshed>& refreshed);
[[nodiscard]] std::string encode_status(const host::Snapshot& snapshot,
                                        const arm::EngineGuardStatus& guard);
[[nodiscard]] bool is_healthy(const host::Snapshot& snapshot);
[[nodiscard]] std::string encode_health(const host::Snapshot& snapshot, const Totals& totals,
                                        const arm::EngineGuardStatus& guard);
[[nodiscard]] std::string encode(const std::vector<arm::Finding>& findings);
[[nodiscard]] std::string encode_version();
[[nodiscard]] std::string encode_error(const BadRequest& error);

}  // namespace agentgate::control

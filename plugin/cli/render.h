// SPDX-License-Identifier: GPL-2.0-or-later
//
// Answers of the control API as text for people. Pure; a key that is missing renders as nothing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace agentgate::cli {

// What a container wrote: lines stay, and nothing in it steers the terminal.
[[nodiscard]] std::string printable_lines(std::string text);
[[nodiscard]] std::string render_report(const nlohmann::json& report);
[[nodiscard]] std::string render_refresh(const nlohmann::json& answer);
[[nodiscard]] std::string render_status(const nlohmann::json& status);
[[nodiscard]] std::string render_health(const nlohmann::json& health);
[[nodiscard]] std::string render_doctor(const nlohmann::json& doctor);

}  // namespace agentgate::cli

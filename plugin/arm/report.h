// SPDX-License-Identifier: GPL-2.0-or-later
//
// What an arm, disarm, check or refresh did, step by step. The same report goes over the API,
// the command line (--json) and, as one line, to the audit file.
#pragma once

#include <string>
#include <vector>

namespace agentgate::arm {

enum class Outcome {
  released,      // exit 0
  closed,        // exit 0: disarm did its work, or check found the port closed
  refused,       // exit 1, GATED_UNARMED: still closed
  undone,        // exit 2: released, found wanting, closed again
  inconsistent,  // exit 3: check found differences
  repaired,      // audit only: the guard put back what others had changed
};

enum class StepOutcome { ok, failed, skipped };

struct Step {
  int number = 0;     // DESIGN.md, 4: 1..13
  std::string phase;  // preconditions, clean slate, default-deny, controls, release
  std::string name;
  StepOutcome outcome = StepOutcome::skipped;
  std::string evidence;  // what was seen; for a failed step the reason and the mend
  double milliseconds = 0;
};

struct Report {
  std::string operation;  // arm, disarm, check, refresh; repair in the audit file
  std::string container;  // as asked
  std::string container_id, container_name, network_id, endpoint_id, port;
  std::string policy, policy_revision;
  Outcome outcome = Outcome::refused;
  std::string reason;  // one sentence for a person; empty on success
  std::string started_at;
  double milliseconds = 0;
  std::vector<Step> steps;
  std::vector<std::string> differences;  // check: "where: expected …, found …"
  std::vector<std::string> notes;        // drift of names, addresses lost to the always-deny set
};

[[nodiscard]] int exit_code(Outcome outcome);
[[nodiscard]] const char* to_string(Outcome outcome);
[[nodiscard]] const char* to_string(StepOutcome outcome);
// "version": 1 first; stable keys. `pretty` breaks lines.
[[nodiscard]] std::string to_json(const Report& report, bool pretty = false);

}  // namespace agentgate::arm

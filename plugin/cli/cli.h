// SPDX-License-Identifier: GPL-2.0-or-later
//
// The command line `agentgate` (docs/cli.md): asks the daemon over the control socket and prints
// the answer, for people as text, with --json exactly as it came.
//
// It decides nothing and needs no privilege but access to the socket; `policy` works without a
// daemon. Single-threaded. Results go to `out`, errors to `err`.
#pragma once

#include <iosfwd>

namespace agentgate::cli {

// Exit codes; 0 to 3 are those of arm::Outcome.
inline constexpr int kExitUnreachable = 4;
inline constexpr int kExitUsage = 64;

int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace agentgate::cli

// SPDX-License-Identifier: GPL-2.0-or-later
#pragma once

#include <string>

namespace agentgate {

// Log to standard error: with a time for people, with "<priority>" (sd-daemon(3)) for the journal.
// `level` is one of trace, debug, info, warn, error.
void start_logging(const std::string& level);

}  // namespace agentgate

// SPDX-License-Identifier: GPL-2.0-or-later
//
// Places where a test can have the daemon killed. AGENTGATE_FAILPOINT=NAME in the environment
// makes the process send itself SIGKILL when it passes the point of that name; compiled in only
// with the CMake option AGENTGATE_FAILPOINTS, else nothing is left of it.
#pragma once

#include <string_view>

namespace agentgate {

#ifdef AGENTGATE_FAILPOINTS
void failpoint(std::string_view name);
#else
inline void failpoint(std::string_view /*name*/) {}
#endif

}  // namespace agentgate

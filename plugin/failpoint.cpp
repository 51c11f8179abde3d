// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/failpoint.h"

#ifdef AGENTGATE_FAILPOINTS
#include <csignal>
#include <cstdlib>

namespace agentgate {

void failpoint(std::string_view name) {
  static const char* const wanted = std::getenv("AGENTGATE_FAILPOINT");
  if (wanted != nullptr && name == wanted) ::raise(SIGKILL);
}

}  // namespace agentgate
#endif

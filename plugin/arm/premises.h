// SPDX-License-Identifier: GPL-2.0-or-later
//
// The premises of a release that can change while it lasts: what `check` reports and what the guard
// closes for. One list of errors each; EPERM with no operation: it does not hold; anything else: it
// could not be looked at. Changes nothing. Threading: any.
#pragma once

#include <vector>

#include "plugin/arm/checks.h"
#include "plugin/host/host.h"

namespace agentgate::arm {

// As the engine describes the container now: restart policy and networks. Pure.
[[nodiscard]] std::vector<Error> broken_by_engine(const engine::Container& container);

// As the kernel shows it: the same process, alone in its network namespace, with the endpoint's
// link and no other. The endpoint must be released.
[[nodiscard]] std::vector<Error> broken_by_kernel(const EndpointRecord& endpoint,
                                                  host::Ports& ports, const System& system,
                                                  const Result<Occupants>& occupants);

// Whether the process that a port was released for still runs.
[[nodiscard]] bool runs(const ProcessIdentity& process, const System& system);

[[nodiscard]] inline bool does_not_hold(const Error& error) {
  return error.code == EPERM && error.operation.empty();
}

// The words for a process that is not the one of the release.
[[nodiscard]] Error another_process();

}  // namespace agentgate::arm

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/premises.h"

#include <fcntl.h>
#include <unistd.h>

namespace agentgate::arm {

std::vector<Error> broken_by_engine(const engine::Container& container) {
  std::vector<Error> out;
  for (const auto check : {check_restart_policy, check_networks}) {
    if (const Evidence evidence = check(container); !evidence) out.push_back(evidence.error());
  }
  return out;
}

bool runs(const ProcessIdentity& process, const System& system) {
  const auto now = engine::process_identity(process.pid, system.proc);
  return now && *now == process;
}

Error another_process() {
  return {"", EPERM, std::nullopt, "released for another process than runs now"};
}

std::vector<Error> broken_by_kernel(const EndpointRecord& endpoint, host::Ports& ports,
                                    const System& system, const Result<Occupants>& occupants) {
  const Release& release = *endpoint.release;
  if (!runs(release.process, system)) return {another_process()};
  std::vector<Error> out;
  const auto unless = [&](const auto& evidence) {
    if (!evidence) out.push_back(evidence.error());
  };
  const std::string path = system.proc + "/" + std::to_string(release.process.pid) + "/ns/net";
  const int netns = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (netns < 0) {
    unless(Status(fail_errno("network namespace of the container", path)));
    return out;
  }
  if (occupants) {
    unless(check_alone(release.process.pid, release.container_id, netns, system, *occupants));
  } else {
    unless(occupants);
  }
  const auto links = ports.sandbox_links(netns);
  ::close(netns);
  if (links) {
    unless(check_links(*links, endpoint, true));
  } else {
    unless(links);
  }
  return out;
}

}  // namespace agentgate::arm

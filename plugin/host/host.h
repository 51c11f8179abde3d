// SPDX-License-Identifier: GPL-2.0-or-later
//
// Host: everything agentgate has on this machine. It owns the kernel (Gate), the state directory
// (Store) and the desired state, and is the only one that changes any of them. Its two clients
// are the driver (networks and endpoints come and go) and the arm pipeline (ports are released
// and closed).
//
// Threading: every method may be called from any thread; the work runs on one owner thread, in
// order, and the caller waits for it (at most Options::patience, then ETIMEDOUT; the work itself
// is still done or found not to be needed). Nothing here calls Docker.
// Errors: EINVAL: the request contradicts itself; EEXIST, EADDRINUSE: taken by another; ENOENT:
// unknown; ENOSPC: the bridge is full; EBUSY: in use; others: as the kernel says.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "netdriver/gate_kernel.h"
#include "plugin/model.h"
#include "plugin/policy/policy.h"

namespace agentgate::host {

struct Options {
  std::filesystem::path state_directory = "/var/lib/agentgate";
  std::chrono::milliseconds patience{20000};
  std::chrono::seconds orphan_age{60};  // an endpoint that nobody joined is collected after this
};

// One endpoint with all that hangs together with it.
struct Port {
  EndpointRecord endpoint;
  NetworkRecord network;
};

struct Snapshot {  // of the whole host, for `status` and `health`
  std::vector<NetworkRecord> networks;
  std::vector<EndpointRecord> endpoints;
  netdriver::KernelFeatures features;
  bool ready = false;                   // the start's restore is done and succeeded
  std::string failure;                  // why it is not
  std::vector<std::string> incidents;   // what start and repair found, newest last, bounded
};

class Host {
 public:
  // Starts the owner thread and returns at once; restore runs there first, so that the driver's
  // socket can answer GetCapabilities before it is done.
  static std::unique_ptr<Host> start(Options options);
  ~Host();  // ends the thread; changes nothing in the kernel

  // -- for the driver ---------------------------------------------------------------------------
  // The same id with the same content: fine, nothing happens. Another content: EEXIST.
  // A pool that overlaps another network's: EADDRINUSE.
  Status create_network(const NetworkRecord& network);
  Status delete_network(const NetworkId& id);  // unknown: fine
  // An address or MAC in use on that network: EADDRINUSE. Unknown network: ENOENT.
  Status create_endpoint(const EndpointRecord& endpoint);
  Status delete_endpoint(const EndpointId& id);  // unknown: fine
  // Remembers the sandbox; returns what Join must answer from. Unknown endpoint: ENOENT.
  Result<Port> join(const EndpointId& id, const std::string& sandbox_key);
  // Closes the port. Unknown: fine.
  Status leave(const EndpointId& id);
  // An empty-body retry was seen: endpoints nobody joined are collected soon.
  void suspect_orphans();

  // -- for the pipeline -------------------------------------------------------------------------
  Result<Port> find(const EndpointId& id);
  Result<std::vector<NetworkRecord>> networks();
  // Step 8 and disarm: closes, forgets the release, reads back. Leaves the link in place.
  Status close(const EndpointId& id);
  // Step 6: removes FDB entry and neighbours as well.
  Status clean(const EndpointId& id);
  // Step 9.
  Status prepare(const EndpointId& id);
  // Step 11. Refused with EINVAL unless prepared. The release is on disk before the kernel has it.
  Status release(const EndpointId& id, const Release& release, const netdriver::PolicySpec& policy);
  // The kernel's view of one port, compared with what is meant.
  Result<netdriver::PortReport> inspect(const EndpointId& id);
  Result<std::vector<netdriver::Difference>> inspect_network(const NetworkId& id);
  Result<std::vector<netdriver::SandboxLink>> sandbox_links(int netns_fd);
  Result<std::vector<netdriver::Difference>> tie(const EndpointId& id,
                                                 const netdriver::SandboxLink& link, int netns_fd);
  Result<std::vector<IpAddress>> host_addresses();

  // -- policies in use --------------------------------------------------------------------------
  // One batch for all ports released to it; what is not in use is only remembered.
  Status update_policy(const netdriver::PolicySpec& policy);
  Result<policy::Resolution> resolution(const std::string& policy);
  Status save_resolution(const std::string& policy, const policy::Resolution& resolution);

  Snapshot snapshot();
  // Closes all ports at once, for a panic button and tests.
  Status close_all();

 private:
  struct Impl;
  explicit Host(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::host

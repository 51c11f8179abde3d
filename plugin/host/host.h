// SPDX-License-Identifier: GPL-2.0-or-later
//
// Host: everything agentgate has on this machine. It owns the kernel (Gate), the state directory
// (Store) and the desired state, and is the only one that changes any of them. Its two clients
// are the driver (Endpoints: networks and endpoints come and go) and the arm pipeline (Ports: ports
// are released and closed).
//
// Threading: every method may be called from any thread; the work runs on one owner thread, in
// order, and the caller waits for it (at most Options::patience, then ETIMEDOUT; the work itself
// is still done or found not to be needed). Nothing here calls Docker.
// Errors: EINVAL: the request contradicts itself; EEXIST, EADDRINUSE: taken by another; ENOENT:
// unknown; ENOSPC: the bridge is full; EBUSY: in use; others: as the kernel says.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "netdriver/gate_kernel.h"
#include "plugin/model.h"
#include "plugin/policy/policy.h"

namespace agentgate::host {

// What the guard found changed by others, and what it did.
struct Repair {
  std::string at;  // RFC 3339, UTC
  std::vector<netdriver::Difference> found;
  std::vector<EndpointId> closed;           // ports that could not be put back
  std::vector<EndpointId> gone;             // endpoints whose link was taken away
  std::vector<netdriver::Difference> left;  // what is still not as meant
  double milliseconds = 0;                  // from looking to having read back
};

// Counted since the start.
struct GuardCounters {
  std::uint64_t looks = 0;     // at notices of the kernel
  std::uint64_t repairs = 0;   // of what others changed
  std::uint64_t failures = 0;  // repairs that left something
  std::uint64_t closed = 0;    // ports closed or lost by it
  std::uint64_t lost = 0;      // times that the kernel threw notices away
};

struct Options {
  std::filesystem::path state_directory = "/var/lib/agentgate";
  std::chrono::milliseconds patience{20000};
  std::chrono::seconds orphan_age{60};  // an endpoint that nobody joined is collected after this
  // Whether the process that a port was released for still runs; asked at the start. Unset: yes.
  std::function<bool(const ProcessIdentity&)> runs;
  netdriver::Ownership ownership = netdriver::Ownership::best;
  bool guard = true;  // listen to the kernel and put back what others change
  std::function<void(const Repair&)> on_repair;  // on the owner thread; must not call Host
  bool manage_firewall = true;  // keep our pair of rules in DOCKER-USER (firewall.h)
};

// One endpoint with all that hangs together with it.
struct Port {
  EndpointRecord endpoint;
  NetworkRecord network;
};

struct Snapshot {  // of the whole host, for `status` and `health`
  std::vector<NetworkRecord> networks;
  std::vector<EndpointRecord> endpoints;
  std::map<std::string, std::string> revisions;  // of the policies that ports are released to
  netdriver::KernelFeatures features;
  bool ready = false;   // the start's restore is done and succeeded
  std::string failure;  // why it is not
  GuardCounters guard;
  std::vector<std::string> incidents;  // what start and repair found, newest last, bounded
};

// What the driver needs of the host.
class Endpoints {
 public:
  virtual ~Endpoints() = default;
  // The same id with the same content: fine, nothing happens. Another content: in place of the
  // first, unless somebody is on that: EEXIST.
  // A pool that overlaps another network's: EADDRINUSE.
  virtual Status create_network(const NetworkRecord& network) = 0;
  virtual Status delete_network(const NetworkId& id) = 0;  // unknown: fine
  // An address or MAC in use on that network: EADDRINUSE. Unknown network: ENOENT.
  virtual Status create_endpoint(const EndpointRecord& endpoint) = 0;
  virtual Status delete_endpoint(const EndpointId& id) = 0;  // unknown: fine
  // Remembers the sandbox; returns what Join must answer from. Unknown endpoint: ENOENT.
  virtual Result<Port> join(const EndpointId& id, const std::string& sandbox_key) = 0;
  // Closes the port. Unknown: fine.
  virtual Status leave(const EndpointId& id) = 0;
  // An empty-body retry was seen: endpoints nobody joined are collected soon.
  virtual void suspect_orphans() = 0;
  // The engine made itself known (Plugin.Activate, GetCapabilities): its firewall may be new.
  virtual void engine_seen() = 0;
};

// What the arm pipeline needs of the host.
class Ports {
 public:
  virtual ~Ports() = default;
  virtual Result<Port> find(const EndpointId& id) = 0;
  virtual Result<std::vector<NetworkRecord>> networks() = 0;
  // Step 8 and disarm: closes, forgets the release, reads back. Leaves the link in place.
  virtual Status close(const EndpointId& id) = 0;
  // Step 6: closes, and removes FDB entry and neighbours as well.
  virtual Status clean(const EndpointId& id) = 0;
  // Step 9.
  virtual Status prepare(const EndpointId& id) = 0;
  // After a release: tells the container where its gateway is (Gate::announce).
  virtual Status announce(const EndpointId& id) = 0;
  // Step 11. EINVAL unless prepared. The release is on disk before the kernel has it.
  virtual Status release(const EndpointId& id, const Release& release,
                         const PolicyRecord& policy) = 0;
  // The kernel's view of one port, compared with what is meant.
  virtual Result<netdriver::PortReport> inspect(const EndpointId& id) = 0;
  // FDB entries that others put on the port. Takes longer the more ports there are.
  virtual Result<std::vector<netdriver::Difference>> foreign_entries(const EndpointId& id) = 0;
  // Bridge, addresses, the constant part of the tables, and the engine's own firewall
  // (DOCKER-USER) where it has one.
  virtual Result<std::vector<netdriver::Difference>> inspect_network(const NetworkId& id) = 0;
  virtual Result<std::vector<netdriver::SandboxLink>> sandbox_links(int netns_fd) = 0;
  virtual Result<std::vector<netdriver::Difference>> tie(const EndpointId& id,
                                                         const netdriver::SandboxLink& link,
                                                         int netns_fd) = 0;
  virtual Result<std::vector<IpAddress>> host_addresses() = 0;

  // One batch for all ports released to it; for a policy that no port uses nothing happens. On
  // disk before the kernel has it.
  virtual Status update_policy(const PolicyRecord& policy) = 0;
  virtual Result<policy::Resolution> resolution(const std::string& policy) = 0;
  virtual Status save_resolution(const std::string& policy,
                                 const policy::Resolution& resolution) = 0;
  virtual Snapshot snapshot() = 0;
};

class Host : public Endpoints, public Ports {
 public:
  // Starts the owner thread and returns at once; restore runs there first, so that the driver's
  // socket can answer GetCapabilities before it is done.
  static std::unique_ptr<Host> start(Options options);
  ~Host() override;  // ends the thread; changes nothing in the kernel

  Status create_network(const NetworkRecord& network) override;
  Status delete_network(const NetworkId& id) override;
  Status create_endpoint(const EndpointRecord& endpoint) override;
  Status delete_endpoint(const EndpointId& id) override;
  Result<Port> join(const EndpointId& id, const std::string& sandbox_key) override;
  Status leave(const EndpointId& id) override;
  void suspect_orphans() override;
  void engine_seen() override;

  Result<Port> find(const EndpointId& id) override;
  Result<std::vector<NetworkRecord>> networks() override;
  Status close(const EndpointId& id) override;
  Status clean(const EndpointId& id) override;
  Status prepare(const EndpointId& id) override;
  Status announce(const EndpointId& id) override;
  Status release(const EndpointId& id, const Release& release, const PolicyRecord& policy) override;
  Result<netdriver::PortReport> inspect(const EndpointId& id) override;
  Result<std::vector<netdriver::Difference>> foreign_entries(const EndpointId& id) override;
  Result<std::vector<netdriver::Difference>> inspect_network(const NetworkId& id) override;
  Result<std::vector<netdriver::SandboxLink>> sandbox_links(int netns_fd) override;
  Result<std::vector<netdriver::Difference>> tie(const EndpointId& id,
                                                 const netdriver::SandboxLink& link,
                                                 int netns_fd) override;
  Result<std::vector<IpAddress>> host_addresses() override;
  Status update_policy(const PolicyRecord& policy) override;
  Result<policy::Resolution> resolution(const std::string& policy) override;
  Status save_resolution(const std::string& policy, const policy::Resolution& resolution) override;
  Snapshot snapshot() override;

 private:
  struct Impl;
  explicit Host(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::host

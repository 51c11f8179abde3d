// SPDX-License-Identifier: GPL-2.0-or-later
//
// The state directory: one small JSON file for each network, endpoint, resolved policy and policy
// that ports are released to.
//
//   DIR/networks/<network id>.json     DIR/endpoints/<endpoint id>.json
//   DIR/policies/<policy name>.json    DIR/released/<policy name>.json
//   DIR/damaged/…                      DIR/lock
//
// A file is written to a temporary name and renamed, so that the end of the daemon leaves the old
// or the new one. Networks and policies are fsynced as well, with their directory: they must
// outlive the machine's. Endpoints and released policies do not: with the machine the container,
// its namespace and its port are gone, and a file that is old, new or damaged then stands for
// nothing (docs/decisions/0007-endpoints-outlive-the-daemon-only.md). Every file carries
// `"version": 1`; unknown keys, wrong types and a name that does not match the content are damage.
// A damaged file is moved to DIR/damaged and reported: the endpoint it described is unknown from
// then on, so its port is removed or stays closed. Threading: one thread at a time (the owner
// thread).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plugin/model.h"

namespace agentgate::store {

struct Contents {
  std::map<NetworkId, NetworkRecord> networks;
  std::map<EndpointId, EndpointRecord> endpoints;
  std::map<std::string, std::string> resolutions;  // policy name -> JSON of policy::Resolution
  std::map<std::string, PolicyRecord> released;    // by policy name
  std::vector<std::string> damaged;                // one message per file set aside
};

class Store {
 public:
  // Creates the directories (mode 0700) and takes DIR/lock (flock). EWOULDBLOCK: another daemon
  // has it. EROFS, EACCES, ENOSPC: as the system says.
  static Result<std::unique_ptr<Store>> open(const std::filesystem::path& directory);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  Result<Contents> load();
  Status save(const NetworkRecord& network);
  Status save(const EndpointRecord& endpoint);
  Status save(const PolicyRecord& policy);
  Status save_resolution(const std::string& policy, const std::string& json);
  // Nothing there is fine.
  Status remove(const NetworkId& id);
  Status remove(const EndpointId& id);
  Status remove_resolution(const std::string& policy);
  Status remove_released(const std::string& policy);

 private:
  struct Impl;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The codecs by themselves, for tests and fuzzing: decode(encode(x)) == x.
[[nodiscard]] std::string encode(const NetworkRecord& network);
[[nodiscard]] std::string encode(const EndpointRecord& endpoint);
[[nodiscard]] std::string encode(const PolicyRecord& policy);
[[nodiscard]] Result<NetworkRecord> decode_network(std::string_view text);
[[nodiscard]] Result<EndpointRecord> decode_endpoint(std::string_view text);
[[nodiscard]] Result<PolicyRecord> decode_policy(std::string_view text);

}  // namespace agentgate::store

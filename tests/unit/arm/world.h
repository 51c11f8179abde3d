// SPDX-License-Identifier: GPL-2.0-or-later
//
// A host for the pipeline, made of folders and fakes: a /proc, cgroups, an engine with one
// container, and ports that remember what was done to them. Tests change it before or during a run.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "plugin/arm/pipeline.h"

namespace agentgate::arm::test {

inline const std::string kContainerId(64, 'c');
inline const std::string kNetworkId(64, 'a');
inline const std::string kEndpointId(64, 'b');
inline constexpr std::int64_t kEnginePid = 100;
inline constexpr std::int64_t kContainerPid = 4242;

class FakeEngine : public engine::Api {
 public:
  Result<engine::Identity> identify() override;
  Result<engine::Container> inspect(const std::string& reference) override;
  Result<engine::Info> info() override;
  Result<std::vector<std::string>> network_endpoints(const std::string& network_id) override;
  Status events(std::chrono::system_clock::time_point since, engine::EventSink& sink) override;
  void interrupt() override {}

  engine::Identity identity{{kEnginePid, 1000}, "1.41"};
  engine::Container container;
  std::map<std::string, engine::Container> others;  // by id
  engine::Info information;
  std::optional<Error> identify_error, inspect_error, info_error;
  int identifies = 0, inspects = 0, infos = 0;
  // Called with the number of the call (from 1) before it is answered.
  std::function<void(int)> on_inspect = [](int) {};
  std::function<void(int)> on_identify = [](int) {};
};

class FakePorts : public host::Ports {
 public:
  Result<host::Port> find(const EndpointId& id) override;
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
  host::Snapshot snapshot() override;

  [[nodiscard]] std::size_t count(const std::string& call) const;
  // Whether the kernel lets something of the port through: a release since the last close.
  [[nodiscard]] bool open(const EndpointId& id) const;

  std::map<NetworkId, NetworkRecord> known_networks;
  std::map<EndpointId, EndpointRecord> endpoints;
  std::map<EndpointId, netdriver::PolicySpec> opened;
  std::map<std::string, std::string> revisions;
  std::vector<netdriver::SandboxLink> links;
  std::vector<IpAddress> addresses;
  std::map<std::string, policy::Resolution> resolutions;
  netdriver::KernelFeatures features{true, true, true, true};
  bool ready = true;

  std::vector<std::string> calls;  // what was called, in order
  // By the call's name: the error it gives; with a number ("inspect 2") only that call's.
  std::map<std::string, Error> errors;
  // The same for what read-backs find.
  std::map<std::string, netdriver::PortReport> reports;
  std::map<std::string, std::vector<netdriver::Difference>> differences;
  // Called before a call is answered, with its name and number: "release 1".
  std::function<void(const std::string&)> on_call = [](const std::string&) {};
  std::vector<netdriver::PolicySpec> updates;

 private:
  // Notes the call; the error it shall give.
  std::optional<Error> enter(const std::string& call);
  template <class Map>
  auto found(const Map& map, const std::string& call) const {
    const auto numbered = map.find(call + " " + std::to_string(count(call)));
    return numbered != map.end() ? numbered : map.find(call);
  }
};

// Everything as it must be for an arm of "a1" to succeed with the built-in policy.
class World : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  void write(const std::filesystem::path& path, const std::string& text) const;
  // 20.10, started in an hour, and the container in two: both long after every file was written.
  void old_engine();
  void started(std::chrono::seconds from_now);
  void process(std::int64_t pid, std::uint64_t start_time, const std::string& netns,
               const std::string& cgroup, const std::string& comm) const;
  // A policy file; needs root, since policies must be root's.
  void policy(const std::string& name, const std::string& json) const;
  Report arm(const std::string& container = "a1",
             const std::optional<std::string>& policy = std::nullopt);
  [[nodiscard]] EndpointId endpoint_id() const { return EndpointId::parse(kEndpointId).value(); }
  [[nodiscard]] EndpointRecord& endpoint() { return ports.endpoints.at(endpoint_id()); }
  [[nodiscard]] std::vector<std::string> audit_lines() const;
  [[nodiscard]] std::string text_of(const std::filesystem::path& path) const;
  // A pipeline with the options as they are now.
  Pipeline& pipeline();

  std::filesystem::path base;
  Options options;
  FakeEngine engine;
  FakePorts ports;
  std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace agentgate::arm::test

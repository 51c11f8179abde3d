// SPDX-License-Identifier: GPL-2.0-or-later
#include "tests/unit/arm/world.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace agentgate::arm::test {

namespace fs = std::filesystem;
using netdriver::PortReport;
using netdriver::PortState;

Result<engine::Identity> FakeEngine::identify() {
  on_identify(++identifies);
  if (identify_error) return tl::unexpected(*identify_error);
  return identity;
}
Result<engine::Container> FakeEngine::inspect(const std::string& reference) {
  on_inspect(++inspects);
  if (inspect_error) return tl::unexpected(*inspect_error);
  if (const auto other = others.find(reference); other != others.end()) return other->second;
  if (reference != container.name && container.id.rfind(reference, 0) != 0) {
    return fail("inspect container " + reference, "No such container: " + reference, ENOENT);
  }
  return container;
}
Result<engine::Info> FakeEngine::info() {
  ++infos;
  if (info_error) return tl::unexpected(*info_error);
  return information;
}
Result<std::vector<std::string>> FakeEngine::network_endpoints(const std::string& /*network_id*/) {
  return std::vector<std::string>();
}
Status FakeEngine::events(std::chrono::system_clock::time_point /*since*/,
                          engine::EventSink& /*sink*/) {
  return fail("watch engine", "the pipeline does not listen", ENOTSUP);
}

std::optional<Error> FakePorts::enter(const std::string& call) {
  calls.push_back(call);
  on_call(call + " " + std::to_string(count(call)));
  const auto error = found(errors, call);
  if (error == errors.end()) return std::nullopt;
  return error->second;
}
std::size_t FakePorts::count(const std::string& call) const {
  return static_cast<std::size_t>(std::count(calls.begin(), calls.end(), call));
}
bool FakePorts::open(const EndpointId& id) const { return opened.count(id) != 0; }

Result<host::Port> FakePorts::find(const EndpointId& id) {
  if (auto error = enter("find")) return tl::unexpected(*error);
  const auto known = endpoints.find(id);
  if (known == endpoints.end()) return fail("find", "the endpoint is not known", ENOENT);
  return host::Port{known->second, known_networks.at(known->second.network)};
}
Result<std::vector<NetworkRecord>> FakePorts::networks() { return snapshot().networks; }
Status FakePorts::close(const EndpointId& id) {
  if (auto error = enter("close")) return tl::unexpected(*error);
  if (endpoints.count(id) == 0) return fail("close", "the endpoint is not known", ENOENT);
  opened.erase(id);
  endpoints.at(id).release.reset();
  return {};
}
Status FakePorts::clean(const EndpointId& id) {
  if (auto error = enter("clean")) return tl::unexpected(*error);
  if (endpoints.count(id) == 0) return fail("clean", "the endpoint is not known", ENOENT);
  opened.erase(id);
  endpoints.at(id).release.reset();
  endpoints.at(id).prepared = false;
  return {};
}
Status FakePorts::prepare(const EndpointId& id) {
  if (auto error = enter("prepare")) return tl::unexpected(*error);
  endpoints.at(id).prepared = true;
  return {};
}
Status FakePorts::announce(const EndpointId& id) {
  if (auto error = enter("announce")) return tl::unexpected(*error);
  EXPECT_TRUE(open(id)) << "announced before it is released";
  return {};
}
Status FakePorts::release(const EndpointId& id, const Release& release,
                          const PolicyRecord& policy) {
  if (auto error = enter("release")) return tl::unexpected(*error);
  EXPECT_TRUE(endpoints.at(id).prepared);
  EXPECT_EQ(release.policy, policy.spec.name);
  endpoints.at(id).release = release;
  opened[id] = policy.spec;
  revisions[policy.spec.name] = policy.revision;
  return {};
}
Result<PortReport> FakePorts::inspect(const EndpointId& id) {
  if (auto error = enter("inspect")) return tl::unexpected(*error);
  const auto given = found(reports, "inspect");
  if (given != reports.end()) return given->second;
  return PortReport{open(id) ? PortState::released : PortState::closed, {}};
}
Result<std::vector<netdriver::Difference>> FakePorts::foreign_entries(const EndpointId& /*id*/) {
  if (auto error = enter("foreign_entries")) return tl::unexpected(*error);
  const auto given = found(differences, "foreign_entries");
  return given == differences.end() ? std::vector<netdriver::Difference>() : given->second;
}
Result<std::vector<netdriver::Difference>> FakePorts::inspect_network(const NetworkId& /*id*/) {
  if (auto error = enter("inspect_network")) return tl::unexpected(*error);
  const auto given = found(differences, "inspect_network");
  return given == differences.end() ? std::vector<netdriver::Difference>() : given->second;
}
Result<std::vector<netdriver::SandboxLink>> FakePorts::sandbox_links(int /*netns_fd*/) {
  if (auto error = enter("sandbox_links")) return tl::unexpected(*error);
  return links;
}
Result<std::vector<netdriver::Difference>> FakePorts::tie(const EndpointId& /*id*/,
                                                          const netdriver::SandboxLink& /*link*/,
                                                          int /*netns_fd*/) {
  if (auto error = enter("tie")) return tl::unexpected(*error);
  const auto given = found(differences, "tie");
  return given == differences.end() ? std::vector<netdriver::Difference>() : given->second;
}
Result<std::vector<IpAddress>> FakePorts::host_addresses() {
  if (auto error = enter("host_addresses")) return tl::unexpected(*error);
  return addresses;
}
Status FakePorts::update_policy(const PolicyRecord& policy) {
  if (auto error = enter("update_policy")) return tl::unexpected(*error);
  updates.push_back(policy.spec);
  revisions[policy.spec.name] = policy.revision;
  return {};
}
Result<policy::Resolution> FakePorts::resolution(const std::string& policy) {
  if (auto error = enter("resolution")) return tl::unexpected(*error);
  return resolutions[policy];
}
Status FakePorts::save_resolution(const std::string& policy, const policy::Resolution& resolution) {
  if (auto error = enter("save_resolution")) return tl::unexpected(*error);
  resolutions[policy] = resolution;
  return {};
}
host::Snapshot FakePorts::snapshot() {
  host::Snapshot out;
  out.revisions = revisions;
  for (const auto& [id, network] : known_networks) out.networks.push_back(network);
  for (const auto& [id, one] : endpoints) out.endpoints.push_back(one);
  out.features = features;
  out.ready = ready;
  return out;
}

void World::write(const fs::path& path, const std::string& text) const {
  fs::create_directories((base / path).parent_path());
  std::ofstream(base / path) << text;
}

void World::process(std::int64_t pid, std::uint64_t start_time, const std::string& netns,
                    const std::string& cgroup, const std::string& comm) const {
  const fs::path at = fs::path("proc") / std::to_string(pid);
  write(at / "stat", std::to_string(pid) + " (" + comm +
                         ") S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 " + std::to_string(start_time) +
                         " 0 0\n");
  write(at / "cgroup", cgroup);
  write(at / "comm", comm + "\n");
  fs::create_directories(base / at / "ns");
  fs::remove(base / at / "ns/net");
  fs::create_symlink(base / "netns" / netns, base / at / "ns/net");
}

void World::policy(const std::string& name, const std::string& json) const {
  write(fs::path("policies") / (name + ".json"), json);
  ::chmod((base / "policies").c_str(), 0755);
  ::chmod((base / "policies" / (name + ".json")).c_str(), 0644);
}

std::string World::text_of(const fs::path& path) const {
  std::ifstream file(base / path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> World::audit_lines() const {
  std::ifstream file(options.audit_file);
  std::vector<std::string> out;
  for (std::string line; std::getline(file, line);) out.push_back(line);
  return out;
}

void World::old_engine() {
  engine.information.server_version = "20.10.24+dfsg1";
  const std::time_t now = std::time(nullptr);
  started(std::chrono::hours(2));
  // Clock ticks since the boot, of which there are a hundred in a second.
  write("proc/stat", "cpu 1 2 3\nbtime " + std::to_string(now + 3600 - 10) + "\n");
}

void World::started(std::chrono::seconds from_now) {
  const std::time_t at = std::time(nullptr) + from_now.count();
  std::tm time{};
  char text[64];
  ::gmtime_r(&at, &time);
  ::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S.123456789Z", &time);
  engine.container.started_at = text;
}

Pipeline& World::pipeline() {
  if (!pipeline_) pipeline_ = std::make_unique<Pipeline>(options, ports, engine);
  return *pipeline_;
}

Report World::arm(const std::string& container, const std::optional<std::string>& policy) {
  return pipeline().arm({container, policy});
}

void World::SetUp() {
  char name[] = "/tmp/agentgate-arm-XXXXXX";
  ASSERT_NE(::mkdtemp(name), nullptr);
  base = name;
  options.policy_directory = base / "policies";
  options.daemon_json = "/daemon.json";  // below the engine's root
  options.audit_file = (base / "log" / "audit.jsonl").string();
  options.host_resolv_conf = "/etc/resolv.conf";  // likewise
  options.system = {(base / "proc").string(), (base / "cgroups").string()};

  write("netns/host", "");
  write("netns/container", "");
  write("netns/other", "");
  write("proc/thread-self/status", "Name:\tagentgated\nCapEff:\t000001ffffffffff\n");
  fs::create_directories(base / "proc/thread-self/ns");
  fs::create_symlink(base / "netns/host", base / "proc/thread-self/ns/net");
  process(kEnginePid, 1000, "host", "0::/system.slice/docker.service\n", "dockerd");
  const std::string cgroup = "4:freezer:/docker/" + kContainerId + "\n0::/\n";
  process(kContainerPid, 5000, "container", cgroup, "runsc-sandbox");
  process(1, 1, "host", "0::/\n", "init");
  write("proc/sys/net/ipv4/ip_forward", "1\n");
  write("proc/sys/net/ipv6/conf/all/forwarding", "1\n");
  write("proc/sys/net/bridge/bridge-nf-call-iptables", "1\n");
  // runsc stops its own kernel; the host's freezer shows nothing.
  write("cgroups/freezer/docker/" + kContainerId + "/freezer.state", "THAWED\n");

  const std::string elf = std::string("\177ELF") + std::string(100, '\0');
  write("engine/usr/bin/runsc", elf + "gvisor.dev/gvisor/runsc/boot");
  write("engine/usr/sbin/runc", elf + "github.com/opencontainers/runc/libcontainer");
  fs::create_symlink(base / "engine", base / "proc" / std::to_string(kEnginePid) / "root");
  write(fs::path("proc") / std::to_string(kEnginePid) / "environ",
        std::string("HOME=/\0PATH=/usr/local/bin:/usr/sbin:/usr/bin\0", 47));

  fs::create_symlink(base / "netns/container", base / "sandbox");
  write("engine/resolv.conf", "nameserver 127.0.0.11\n");
  write("engine/etc/resolv.conf", "nameserver 192.0.2.53\n");

  engine.container.id = kContainerId;
  engine.container.name = "a1";
  engine.container.runtime = "runsc";
  engine.container.restart_policy = "no";
  engine.container.network_mode = "agents";
  engine.container.ipc_mode = "private";
  engine.container.running = engine.container.paused = true;
  engine.container.pid = kContainerPid;
  engine.container.started_at = "2026-01-02T03:04:05Z";
  engine.container.sandbox_key = (base / "sandbox").string();
  engine.container.resolv_conf_path = "/resolv.conf";
  engine.container.attachments = {
      {"agents", kNetworkId, kEndpointId, "02:00:00:00:00:02", "10.99.0.2", "fd99::2"}};
  engine.information.server_version = "28.5.2";
  engine.information.runtimes = {{"runc", {"runc", "", "", {}}},
                                 {"runsc", {"/usr/bin/runsc", "", "", {}}}};

  NetworkRecord network;
  network.id = NetworkId::parse(kNetworkId).value();
  network.gateway4 = Ipv4InterfaceAddress::parse("10.99.0.1/24").value();
  network.gateway6 = Ipv6InterfaceAddress::parse("fd99::1/64").value();
  network.policy = "default";
  ports.known_networks[network.id] = network;
  EndpointRecord record;
  record.id = endpoint_id();
  record.network = network.id;
  record.address4 = Ipv4Address::parse("10.99.0.2").value();
  record.address6 = Ipv6Address::parse("fd99::2").value();
  record.mac = MacAddress::parse("02:00:00:00:00:02").value();
  record.sandbox_key = (base / "sandbox").string();
  ports.endpoints[record.id] = record;
  netdriver::SandboxLink link;
  link.name = InterfaceName::parse("eth0").value();
  link.index = 7;
  link.peer_index = 8;
  link.mac = record.mac;
  link.up = true;
  link.kind = "veth";
  ports.links = {link};
  ports.addresses = {IpAddress::parse("10.99.0.1").value(), IpAddress::parse("192.0.2.1").value()};

  const auto now = std::chrono::system_clock::now();
  for (const auto& rule : policy::builtin().names) {
    policy::ResolvedName resolved;
    // Not from the ranges for documentation: those are always denied.
    resolved.addresses = {{IpAddress::parse("160.79.104.10").value(), now},
                          {IpAddress::parse("2606:4700::10").value(), now}};
    resolved.resolved_at = now;
    ports.resolutions["default"].names[rule.name] = resolved;
  }
}

void World::TearDown() {
  pipeline_.reset();
  fs::remove_all(base);
}

}  // namespace agentgate::arm::test

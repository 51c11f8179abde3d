// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plugin/engine/engine.h"
#include "tests/unit/engine/answers.h"

namespace agentgate::engine {
namespace {

using nlohmann::json;

TEST(EngineDecode, ContainerOf2010) {
  const auto decoded = container_from_json(test::kContainer20);
  ASSERT_TRUE(decoded) << decoded.error().to_string();
  EXPECT_EQ(decoded->id, "c1b0aa20b7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a");
  EXPECT_EQ(decoded->name, "a1");
  EXPECT_EQ(decoded->image, "img:1");
  EXPECT_EQ(decoded->runtime, "runsc");
  EXPECT_EQ(decoded->restart_policy, "no");
  EXPECT_EQ(decoded->network_mode, "agents");
  EXPECT_EQ(decoded->ipc_mode, "private");
  EXPECT_EQ(decoded->pid_mode, "");
  EXPECT_EQ(decoded->cgroupns_mode, "host");
  EXPECT_FALSE(decoded->privileged);
  EXPECT_TRUE(decoded->running);
  EXPECT_TRUE(decoded->paused);
  EXPECT_FALSE(decoded->restarting);
  EXPECT_EQ(decoded->pid, 4242);
  EXPECT_EQ(decoded->started_at, "2026-01-02T03:04:05.5Z");
  EXPECT_EQ(decoded->sandbox_key, "/var/run/docker/netns/0123456789ab");
  EXPECT_EQ(decoded->resolv_conf_path, "/var/lib/docker/containers/c1b0/resolv.conf");
  EXPECT_TRUE(decoded->published_ports.empty());  // exposed is not published
  EXPECT_FALSE(decoded->publish_all_ports);
  EXPECT_TRUE(decoded->capabilities_added.empty());
  EXPECT_EQ(decoded->swarm_service, "");
  EXPECT_EQ(decoded->dns, std::vector<std::string>{"192.0.2.53"});
  ASSERT_EQ(decoded->attachments.size(), 1U);
  const Attachment& attachment = decoded->attachments[0];
  EXPECT_EQ(attachment.name, "agents");
  EXPECT_EQ(attachment.network_id,
            "7e5c4e1f0c2d3b4a5968778695a4b3c2d1e0f00112233445566778a9b0c1d2e3");
  EXPECT_EQ(attachment.endpoint_id,
            "e5968778695a4b3c2d1e0f00112233445566778a9b0c1d2e37e5c4e1f0c2d3b4");
  EXPECT_EQ(attachment.mac, "02:42:0a:63:00:02");
  EXPECT_EQ(attachment.address4, "10.99.0.2");
  EXPECT_EQ(attachment.address6, "fd99::2");
}

TEST(EngineDecode, ContainerOf29) {
  const auto decoded = container_from_json(test::kContainer29);
  ASSERT_TRUE(decoded) << decoded.error().to_string();
  EXPECT_TRUE(decoded->privileged);
  EXPECT_FALSE(decoded->paused);
  EXPECT_EQ(decoded->network_mode, "container:abc");
  EXPECT_EQ(decoded->pid_mode, "host");
  EXPECT_EQ(decoded->uts_mode, "host");
  EXPECT_EQ(decoded->userns_mode, "host");
  EXPECT_EQ(decoded->restart_policy, "unless-stopped");
  EXPECT_EQ(decoded->published_ports, std::vector<std::string>{"80/tcp"});
  EXPECT_TRUE(decoded->publish_all_ports);
  EXPECT_EQ(decoded->capabilities_added, std::vector<std::string>{"CAP_NET_ADMIN"});
  ASSERT_EQ(decoded->attachments.size(), 2U);
  EXPECT_EQ(decoded->attachments[0].name, "alpha");  // sorted
  EXPECT_EQ(decoded->attachments[1].name, "zeta");
}

TEST(EngineDecode, ContainerThatNeverRan) {
  const auto decoded = container_from_json(test::kContainerCreated26);
  ASSERT_TRUE(decoded) << decoded.error().to_string();
  EXPECT_FALSE(decoded->running);
  EXPECT_EQ(decoded->pid, 0);
  EXPECT_EQ(decoded->restart_policy, "");
  EXPECT_EQ(decoded->attachments.size(), 1U);
}

// Anybody may give a container the label of a task: what cannot be a service's name is not one.
TEST(EngineDecode, KnowsATask) {
  const auto service = [](const std::string& labels) {
    const auto decoded =
        container_from_json(R"({"Id": "x", "Config": {"Labels": )" + labels + "}}");
    return decoded ? decoded->swarm_service : decoded.error().to_string();
  };
  EXPECT_EQ(service("null"), "");
  EXPECT_EQ(service(R"({"com.docker.swarm.service.name": "web_1.a-B"})"), "web_1.a-B");
  EXPECT_EQ(service(R"({"com.docker.swarm.service.name": "web; reboot"})"), "");
  EXPECT_EQ(service(R"({"com.docker.swarm.service.name": "\u001b[2J"})"), "");
  EXPECT_EQ(service(R"({"com.docker.swarm.service.name": ")" + std::string(64, 'a') + "\"}"), "");
}

TEST(EngineDecode, AbsentKeysAreEmpty) {
  const auto decoded = container_from_json(R"({"Id": "x"})");
  ASSERT_TRUE(decoded);
  EXPECT_FALSE(decoded->running);
  EXPECT_FALSE(decoded->paused);
  EXPECT_TRUE(decoded->attachments.empty());
}

// A key that decides something, with a value of another kind: an answer that cannot be trusted.
TEST(EngineDecode, WrongTypesAreRefusedAndNamed) {
  const std::pair<const char*, const char*> decisive[] = {
      {"", "Id"},
      {"", "Name"},
      {"", "HostConfig"},
      {"", "State"},
      {"", "NetworkSettings"},
      {"", "ResolvConfPath"},
      {"/HostConfig", "Privileged"},
      {"/HostConfig", "PublishAllPorts"},
      {"/HostConfig", "PortBindings"},
      {"/HostConfig", "RestartPolicy"},
      {"/HostConfig/RestartPolicy", "Name"},
      {"/HostConfig", "NetworkMode"},
      {"/HostConfig", "PidMode"},
      {"/HostConfig", "IpcMode"},
      {"/HostConfig", "UTSMode"},
      {"/HostConfig", "Runtime"},
      {"/HostConfig", "CapAdd"},
      {"/State", "Running"},
      {"/State", "Paused"},
      {"/State", "Restarting"},
      {"/State", "Pid"},
      {"/State", "StartedAt"},
      {"/NetworkSettings", "SandboxKey"},
      {"/NetworkSettings", "Networks"},
      {"/NetworkSettings/Networks/agents", "EndpointID"},
      {"/NetworkSettings/Networks/agents", "NetworkID"},
      {"/NetworkSettings/Networks/agents", "MacAddress"},
      {"/NetworkSettings/Networks/agents", "IPAddress"}};
  for (const auto& [at, key] : decisive) {
    json root = json::parse(test::kContainer20);
    root[json::json_pointer(at)][key] = 1.5;
    const auto decoded = container_from_json(root.dump());
    ASSERT_FALSE(decoded) << at << "/" << key;
    EXPECT_EQ(decoded.error().code, EPROTO);
  }
  json root = json::parse(test::kContainer20);
  root["State"]["Paused"] = "true";
  EXPECT_NE(container_from_json(root.dump()).error().text.find("\"Paused\""), std::string::npos);
  root = json::parse(test::kContainer20);
  root["HostConfig"]["PortBindings"]["80/tcp"] = "8080";
  EXPECT_FALSE(container_from_json(root.dump()));
  root = json::parse(test::kContainer20);
  root["NetworkSettings"]["Networks"]["agents"] = json::array();
  EXPECT_FALSE(container_from_json(root.dump()));
}

TEST(EngineDecode, NotAContainer) {
  for (const char* text : {"", "[]", "null", "{", "{}", "\"x\"", "{\"Id\":\"\"}"}) {
    const auto decoded = container_from_json(text);
    ASSERT_FALSE(decoded) << text;
    EXPECT_EQ(decoded.error().code, EPROTO);
  }
  const std::string whole = test::kContainer20;
  for (std::size_t length = 0; length < whole.size(); length += 13) {
    EXPECT_FALSE(container_from_json(whole.substr(0, length)));
  }
}

TEST(EngineDecode, InfoOf2010) {
  const auto info = info_from_json(test::kInfo20);
  ASSERT_TRUE(info) << info.error().to_string();
  EXPECT_EQ(info->server_version, "20.10.24+dfsg1");
  EXPECT_EQ(info->default_runtime, "runc");
  EXPECT_EQ(info->docker_root, "/var/lib/docker");
  EXPECT_EQ(info->runtimes.size(), 4U);
  EXPECT_EQ(info->runtimes.at("runsc"),
            (Runtime{"/usr/bin/runsc", "", "", {"--platform=systrap"}}));
}

TEST(EngineDecode, InfoOf29) {
  const auto info = info_from_json(test::kInfo29);
  ASSERT_TRUE(info) << info.error().to_string();
  EXPECT_EQ(info->runtimes.at("gvisor"), (Runtime{"", "io.containerd.runsc.v1", "", {}}));
  EXPECT_EQ(info->runtimes.at("crun"), (Runtime{"", "io.containerd.runc.v2", "/usr/bin/crun", {}}));
  EXPECT_FALSE(info_from_json(R"({"Runtimes": []})"));
  EXPECT_FALSE(info_from_json(R"({"Runtimes": {"a": {"path": 1}}})"));
  EXPECT_FALSE(info_from_json("[]"));
  const auto configured = runtimes_from_daemon_json(
      R"({"runtimes": {"gv": {"runtimeType": "io.containerd.runsc.v1"}, "x": {"path": "/x"}}})");
  ASSERT_TRUE(configured);
  EXPECT_EQ(configured->at("gv").type, "io.containerd.runsc.v1");
  EXPECT_EQ(configured->at("x").path, "/x");
  EXPECT_TRUE(runtimes_from_daemon_json("{}")->empty());
  EXPECT_FALSE(runtimes_from_daemon_json(R"({"runtimes": []})"));
  EXPECT_FALSE(runtimes_from_daemon_json("nothing"));
  const auto dns = dns_from_daemon_json(R"({"dns": ["192.0.2.53"], "resolv-conf": "/x"})");
  ASSERT_TRUE(dns);
  EXPECT_EQ(dns->servers, std::vector<std::string>{"192.0.2.53"});
  EXPECT_EQ(dns->resolv_conf, "/x");
  EXPECT_TRUE(dns_from_daemon_json("{}")->servers.empty());
  EXPECT_FALSE(dns_from_daemon_json(R"({"dns": "192.0.2.53"})"));
  EXPECT_FALSE(dns_from_daemon_json("nothing"));
}

TEST(EngineDecode, EndpointsOfANetwork) {
  const auto endpoints = endpoints_from_json(
      R"({"Id": "n", "Containers": {"c1": {"Name": "a", "EndpointID": "e1"},
                                    "ep-e2": {"EndpointID": "e2"}}})");
  ASSERT_TRUE(endpoints);
  EXPECT_EQ(*endpoints, (std::vector<std::string>{"e1", "e2"}));
  EXPECT_TRUE(endpoints_from_json(R"({"Id": "n"})")->empty());
  EXPECT_FALSE(endpoints_from_json(R"({"Containers": []})"));
  EXPECT_FALSE(endpoints_from_json(R"({"Containers": {"a": {"EndpointID": 1}}})"));
}

}  // namespace
}  // namespace agentgate::engine

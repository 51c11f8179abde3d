// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>

#include <nlohmann/json.hpp>

#include "plugin/engine/engine.h"

namespace agentgate::engine {
namespace {

using nlohmann::json;

// Reads what is there. A key that is absent or null gives the empty value: engines differ in what
// they leave out. A key of another type is an answer that cannot be trusted.
class View {
 public:
  View(const json* value, std::string* problem) : value_(value), problem_(problem) {}

  [[nodiscard]] View at(const char* key) const {
    if (value_ == nullptr || value_->is_null()) return {nullptr, problem_};
    if (!value_->is_object()) return wrong(key);
    const auto found = value_->find(key);
    return {found == value_->end() || found->is_null() ? nullptr : &*found, problem_};
  }
  [[nodiscard]] std::string text(const char* key) const {
    const View v = at(key);
    if (v.value_ == nullptr) return {};
    if (!v.value_->is_string()) return wrong(key), std::string();
    return v.value_->get<std::string>();
  }
  [[nodiscard]] bool flag(const char* key) const {
    const View v = at(key);
    if (v.value_ == nullptr) return false;
    if (!v.value_->is_boolean()) return wrong(key), false;
    return v.value_->get<bool>();
  }
  [[nodiscard]] std::int64_t number(const char* key) const {
    const View v = at(key);
    if (v.value_ == nullptr) return 0;
    if (!v.value_->is_number_integer()) return wrong(key), 0;
    return v.value_->get<std::int64_t>();
  }
  [[nodiscard]] std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> out;
    const View v = at(key);
    if (v.value_ == nullptr) return out;
    if (!v.value_->is_array()) return wrong(key), out;
    for (const json& item : *v.value_) {
      if (!item.is_string()) return wrong(key), out;
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  template <class Each>
  void members(const char* key, const Each& each) const {
    const View v = at(key);
    if (v.value_ == nullptr) return;
    if (!v.value_->is_object()) {
      wrong(key);
      return;
    }
    for (const auto& [name, value] : v.value_->items()) each(name, View(&value, problem_), value);
  }

 private:
  View wrong(const char* key) const {
    if (problem_->empty()) *problem_ = std::string("\"") + key + "\" is of an unexpected type";
    return {nullptr, problem_};
  }
  const json* value_;
  std::string* problem_;
};

bool is_service_name(const std::string& text) {
  return !text.empty() && text.size() <= 63 &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '-' || c == '_' || c == '.';
         });
}

}  // namespace

Result<Container> container_from_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read container", "not a JSON object", EPROTO);
  std::string problem;
  const View view(&root, &problem);
  Container out;
  out.id = view.text("Id");
  out.name = view.text("Name");
  if (!out.name.empty() && out.name[0] == '/') out.name.erase(0, 1);
  out.image = view.at("Config").text("Image");
  out.resolv_conf_path = view.text("ResolvConfPath");
  // Anybody can give a container this label: it is for messages, and judges nothing.
  out.swarm_service = view.at("Config").at("Labels").text("com.docker.swarm.service.name");
  if (!is_service_name(out.swarm_service)) out.swarm_service.clear();
  const View host = view.at("HostConfig");
  out.runtime = host.text("Runtime");
  out.restart_policy = host.at("RestartPolicy").text("Name");
  out.network_mode = host.text("NetworkMode");
  out.pid_mode = host.text("PidMode");
  out.ipc_mode = host.text("IpcMode");
  out.uts_mode = host.text("UTSMode");
  out.userns_mode = host.text("UsernsMode");
  out.cgroupns_mode = host.text("CgroupnsMode");
  out.privileged = host.flag("Privileged");
  out.publish_all_ports = host.flag("PublishAllPorts");
  out.capabilities_added = host.texts("CapAdd");
  out.dns = host.texts("Dns");
  host.members("PortBindings", [&](const std::string& port, const View&, const json& bindings) {
    if (bindings.is_null()) return;
    if (!bindings.is_array()) {
      if (problem.empty()) problem = "\"PortBindings\" is of an unexpected type";
    } else if (!bindings.empty()) {
      out.published_ports.push_back(port);
    }
  });
  const View state = view.at("State");
  out.running = state.flag("Running");
  out.paused = state.flag("Paused");
  out.restarting = state.flag("Restarting");
  out.dead = state.flag("Dead");
  out.pid = state.number("Pid");
  out.started_at = state.text("StartedAt");
  const View settings = view.at("NetworkSettings");
  out.sandbox_key = settings.text("SandboxKey");
  settings.members("Networks", [&](const std::string& name, const View& network, const json&) {
    Attachment attachment;
    attachment.name = name;
    attachment.network_id = network.text("NetworkID");
    attachment.endpoint_id = network.text("EndpointID");
    attachment.mac = network.text("MacAddress");
    attachment.address4 = network.text("IPAddress");
    attachment.address6 = network.text("GlobalIPv6Address");
    out.attachments.push_back(std::move(attachment));
  });
  std::sort(out.attachments.begin(), out.attachments.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  if (problem.empty() && out.id.empty()) problem = "\"Id\" is missing";
  if (!problem.empty()) return fail("read container", problem, EPROTO);
  return out;
}

namespace {
Runtime runtime_from(const View& runtime) {
  Runtime out;
  out.path = runtime.text("path");
  out.type = runtime.text("runtimeType");
  out.binary = runtime.at("options").text("BinaryName");
  out.arguments = runtime.texts("runtimeArgs");
  return out;
}
}  // namespace

Result<std::map<std::string, Runtime>> runtimes_from_daemon_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read daemon.json", "not a JSON object", EPROTO);
  std::string problem;
  std::map<std::string, Runtime> out;
  View(&root, &problem)
      .members("runtimes", [&](const std::string& name, const View& runtime, const json&) {
        out[name] = runtime_from(runtime);
      });
  if (!problem.empty()) return fail("read daemon.json", problem, EPROTO);
  return out;
}

Result<DnsSettings> dns_from_daemon_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read daemon.json", "not a JSON object", EPROTO);
  std::string problem;
  const View view(&root, &problem);
  DnsSettings out{view.texts("dns"), view.text("resolv-conf")};
  if (!problem.empty()) return fail("read daemon.json", problem, EPROTO);
  return out;
}

Result<Info> info_from_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read engine info", "not a JSON object", EPROTO);
  std::string problem;
  const View view(&root, &problem);
  Info out;
  out.id = view.text("ID");
  out.server_version = view.text("ServerVersion");
  out.docker_root = view.text("DockerRootDir");
  out.default_runtime = view.text("DefaultRuntime");
  view.members("Runtimes", [&](const std::string& name, const View& runtime, const json&) {
    out.runtimes[name] = runtime_from(runtime);
  });
  if (!problem.empty()) return fail("read engine info", problem, EPROTO);
  return out;
}

Result<std::vector<std::string>> endpoints_from_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read network", "not a JSON object", EPROTO);
  std::string problem;
  std::vector<std::string> out;
  View(&root, &problem)
      .members("Containers", [&](const std::string&, const View& one, const json&) {
        std::string id = one.text("EndpointID");
        if (!id.empty()) out.push_back(std::move(id));
      });
  if (!problem.empty()) return fail("read network", problem, EPROTO);
  return out;
}

Result<Event> event_from_json(std::string_view text) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return fail("read event", "not a JSON object", EPROTO);
  std::string problem;
  const View view(&root, &problem);
  const View actor = view.at("Actor");
  const View attributes = actor.at("Attributes");
  Event out;
  out.type = view.text("Type");
  out.action = view.text("Action");
  out.name = attributes.text("name");
  // A network's event names the container that comes or goes among its attributes.
  out.container = out.type == "container" ? actor.text("ID") : attributes.text("container");
  if (problem.empty() && out.type.empty()) problem = "\"Type\" is missing";
  if (problem.empty() && out.action.empty()) problem = "\"Action\" is missing";
  if (problem.empty() && out.type == "container" && out.container.empty()) {
    problem = "the container's \"ID\" is missing";
  }
  if (!problem.empty()) return fail("read event", problem, EPROTO);
  return out;
}

}  // namespace agentgate::engine

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "plugin/arm/checks.h"

namespace agentgate::arm {
namespace {

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

std::vector<std::string> policy_names(const Options& options) {
  auto names = policy::list(options.policy_directory);
  std::vector<std::string> all = names ? std::move(*names) : std::vector<std::string>();
  if (std::find(all.begin(), all.end(), "default") == all.end()) all.emplace_back("default");
  return all;
}

// Policies that allow runc and do not accept that the engine's resolver asks from the host.
std::vector<std::string> refused_for_the_resolver(const Options& options) {
  std::vector<std::string> out;
  for (const std::string& name : policy_names(options)) {
    const auto loaded = policy::load(options.policy_directory, name);
    if (!loaded || loaded->accept_host_resolver) continue;
    const auto& runtimes = loaded->runtimes;
    if (std::find(runtimes.begin(), runtimes.end(), "runc") != runtimes.end()) out.push_back(name);
  }
  return out;
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

std::vector<Finding> examine(const Options& options, host::Ports& ports, engine::Api& engine,
                             const EngineGuardStatus& guard) {
  std::vector<Finding> out;
  const auto add = [&](const char* check, const char* outcome, std::string seen, std::string mend) {
    out.push_back({check, outcome, std::move(seen), std::move(mend)});
  };
  const auto from = [&](const char* check, const Evidence& evidence) {
    if (evidence) {
      add(check, "ok", *evidence, "");
    } else {
      add(check, "missing", evidence.error().to_string(), evidence.error().text);
    }
  };

  from("daemon.capabilities", check_capabilities(options.system));
  const host::Snapshot snapshot = ports.snapshot();
  if (snapshot.ready) {
    add("daemon.ready", "ok",
        std::to_string(snapshot.networks.size()) + " networks, " +
            std::to_string(snapshot.endpoints.size()) + " endpoints",
        "");
  } else {
    add("daemon.ready", "missing", snapshot.failure, "mend what it says and restart agentgated");
  }
  const auto feature = [&](const char* check, bool have, const char* missing_outcome,
                           const char* mend) {
    add(check, have ? "ok" : missing_outcome, have ? "present" : "absent", have ? "" : mend);
  };
  feature("kernel.netdev_egress", snapshot.features.netdev_egress, "missing",
          "needs Linux 5.16 or newer with CONFIG_NETFILTER_EGRESS");
  feature("kernel.owner_persist", snapshot.features.owner_persist, "warning",
          "needs Linux 6.9 or newer; without it another program's `nft flush ruleset` empties our "
          "tables (closed ports stay closed by the bridge's port flags)");

  if (!snapshot.features.bridge_locked && snapshot.endpoints.empty()) {
    // It takes a bridge port to see it, and every port is read back when it is made.
    add("kernel.bridge_locked", "ok", "not tried before the first port", "");
  } else {
    feature("kernel.bridge_locked", snapshot.features.bridge_locked, "missing",
            "needs Linux 5.16 or newer");
  }
  const auto iptables = [] {
    for (const char* folder : {"/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"}) {
      std::string path = std::string(folder) + "/iptables";
      if (::access(path.c_str(), X_OK) == 0) return path;
    }
    return std::string();
  }();
  add("firewall.iptables", iptables.empty() ? "warning" : "ok",
      iptables.empty() ? "no iptables" : iptables,
      iptables.empty() ? "install iptables: an engine that filters with it drops what leaves our "
                         "networks unless our two rules are in DOCKER-USER"
                       : "");

  const auto identity = engine.identify();
  if (!identity) {
    add("engine.api", "missing", identity.error().to_string(),
        "start the engine, or give its socket with --engine-socket");
  } else {
    add("engine.api", "ok",
        "API " + identity->api_version + ", pid " + std::to_string(identity->process.pid), "");
    from("engine.namespace", check_namespace(identity->process.pid, options.system));
    const auto info = engine.info();
    if (!info) {
      add("engine.info", "missing", info.error().to_string(), "see the engine's log");
    } else {
      bool gvisor = false;
      for (const auto& [name, runtime] : info->runtimes) {
        const auto is = identify_runtime(name, runtime, identity->process.pid, options.system);
        gvisor = gvisor || (is && is->kind == "runsc");
      }
      if (gvisor) {
        add("runtime.runsc", "ok", "found in the engine's runtime table", "");
      } else {
        add("runtime.runsc", "warning", "no runtime of the engine is gVisor's runsc",
            "install runsc and add it to \"runtimes\" in " + options.daemon_json +
                ", or allow \"runc\" in your policies");
      }
      const auto resolver =
          find_engine_resolver(info->server_version, identity->process, options.daemon_json,
                               options.host_resolv_conf, options.system);
      if (!resolver) {
        add("resolver.loopback", "missing", resolver.error().to_string(), "mend the file");
      } else if (!resolver->by_host) {
        add("resolver.loopback", "ok", resolver->seen, "");
      } else {
        const std::vector<std::string> refused = refused_for_the_resolver(options);
        const std::string arms =
            refused.empty()
                ? "; no policy that allows runc is without \"accept_host_resolver\""
                : "; runc containers without --dns are not armed under policy " + joined(refused);
        add("resolver.loopback", refused.empty() ? "warning" : "missing",
            resolver->seen + ", for closed runc containers as well" + arms,
            "set \"dns\": [\"ADDRESS\"] in " + options.daemon_json +
                " to one that is not loopback and restart the engine, or start containers with "
                "--dns; see docs/policy.md");
      }
    }
  }
  if (guard.connected) {
    add("engine.events", "ok", "connected to the engine's events since " + guard.since, "");
  } else {
    add("engine.events", "missing",
        "not connected to the engine's events: " +
            (guard.since.empty() ? std::string("not started") : guard.reason),
        "released containers are not watched until the engine answers on --engine-socket; "
        "agentgated tries by itself");
  }
  const std::string v4 = first_word(options.system.proc + "/sys/net/ipv4/ip_forward");
  add("forwarding.ipv4", v4 == "1" ? "ok" : "missing", v4,
      v4 == "1" ? "" : "run: sysctl -w net.ipv4.ip_forward=1");
  const std::string v6 = first_word(options.system.proc + "/sys/net/ipv6/conf/all/forwarding");
  const bool need_v6 =
      std::any_of(snapshot.networks.begin(), snapshot.networks.end(),
                  [](const auto& network) { return network.gateway6.has_value(); });
  add("forwarding.ipv6", v6 == "1" || !need_v6 ? "ok" : "missing",
      v6 + (need_v6 ? "" : " (no network with IPv6)"),
      v6 == "1" || !need_v6 ? "" : "run: sysctl -w net.ipv6.conf.all.forwarding=1");

  const auto names = policy::list(options.policy_directory);
  if (!names) {
    add("policies.directory", "missing", names.error().to_string(), "make it readable for root");
  } else {
    for (const std::string& name : policy_names(options)) {
      const auto loaded = policy::load(options.policy_directory, name);
      const std::string check = "policy." + name;
      if (loaded) {
        add(check.c_str(), "ok", "revision " + loaded->revision, "");
      } else {
        add(check.c_str(), "missing", loaded.error().text, "mend the file; see docs/policy.md");
      }
    }
  }
  return out;
}

}  // namespace agentgate::arm

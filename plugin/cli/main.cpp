// SPDX-License-Identifier: GPL-2.0-or-later
//
// agentgate: the command line. It asks the daemon over the control socket and prints the answer;
// only `policy` works without a daemon.
//
// Exit codes: 0 done, 1 refused (still closed), 2 release undone, 3 inconsistent, 4 the daemon
// cannot be reached, 64 usage.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "plugin/http/client.h"
#include "plugin/model.h"
#include "plugin/policy/policy.h"

namespace {

using nlohmann::ordered_json;

constexpr int kUnreachable = 4;
constexpr int kUsage = 64;

struct Context {
  std::string socket = "/run/agentgate/agentgate.sock";
  unsigned timeout = 60;
  bool json = false;
};

// Asks the daemon. On failure the message is printed and the exit code is in `exit`.
std::optional<ordered_json> ask(const Context& context, const std::string& method,
                                const std::string& path, const ordered_json& body, int& exit) {
  const auto response =
      agentgate::http::request(context.socket, method, path, body.is_null() ? "" : body.dump(),
                               std::chrono::seconds(context.timeout));
  if (!response) {
    std::cerr << "agentgate: the daemon cannot be reached on " << context.socket << ": "
              << response.error().to_string() << "\nIs agentgated running? (systemctl status "
              << "agentgated; --socket names another socket)\n";
    exit = kUnreachable;
    return std::nullopt;
  }
  ordered_json answer = ordered_json::parse(response->body, nullptr, false);
  if (!answer.is_object()) {
    std::cerr << "agentgate: the daemon's answer (status " << response->status
              << ") is not JSON; do the versions of daemon and command match?\n";
    exit = kUnreachable;
    return std::nullopt;
  }
  if (response->status != 200) {
    const auto error = answer.value("error", ordered_json::object());
    std::cerr << "agentgate: " << error.value("field", "") << " " << error.value("text", "")
              << "\n";
    exit = kUsage;
    return std::nullopt;
  }
  exit = answer.value("exit", 0);
  return answer;
}

void print_report(const ordered_json& report) {
  for (const auto& step : report.value("steps", ordered_json::array())) {
    if (step.value("outcome", "") == "skipped") continue;
    std::printf("%-6s %2d  %-20s %8.3f ms  %s\n", step.value("outcome", "").c_str(),
                step.value("step", 0), step.value("name", "").c_str(), step.value("ms", 0.0),
                step.value("evidence", "").c_str());
  }
  for (const auto& difference : report.value("differences", ordered_json::array())) {
    std::printf("differs  %s\n", difference.get<std::string>().c_str());
  }
  for (const auto& note : report.value("notes", ordered_json::array())) {
    std::printf("note     %s\n", note.get<std::string>().c_str());
  }
  const std::string code = report.value("code", "");
  std::printf("%s %s: %s%s%s (%.3f ms)\n", report.value("operation", "").c_str(),
              report.value("container", "").c_str(), report.value("outcome", "").c_str(),
              code.empty() ? "" : " ", code.c_str(), report.value("ms", 0.0));
  const std::string reason = report.value("reason", "");
  if (!reason.empty()) std::fprintf(stderr, "agentgate: %s\n", reason.c_str());
}

void show(const Context& context, const ordered_json& answer,
          const std::function<void(const ordered_json&)>& print) {
  if (context.json) {
    std::cout << answer.dump(2) << "\n";
  } else {
    print(answer);
  }
}

int each_container(const Context& context, const std::vector<std::string>& containers,
                   const std::string& path, const std::string& policy) {
  int worst = 0;
  for (const std::string& container : containers) {
    ordered_json body = {{"container", container}};
    if (!policy.empty()) body["policy"] = policy;
    int exit = 0;
    if (const auto answer = ask(context, "POST", path, body, exit)) {
      show(context, *answer, print_report);
    }
    worst = std::max(worst, exit);
  }
  return worst;
}

int refresh(const Context& context, const std::string& policy) {
  int exit = 0;
  const ordered_json body =
      policy.empty() ? ordered_json::object() : ordered_json{{"policy", policy}};
  const auto answer = ask(context, "POST", "/v1/refresh", body, exit);
  if (!answer) return exit;
  show(context, *answer, [](const ordered_json& root) {
    const auto policies = root.value("policies", ordered_json::array());
    if (policies.empty()) std::printf("no policy is in use\n");
    for (const auto& one : policies) {
      std::printf("%-32s %s  ports %u  added %zu  removed %zu  kept %zu\n",
                  one.value("policy", "").c_str(), one.value("ok", false) ? "ok    " : "FAILED",
                  one.value("ports", 0U), one["added"].size(), one["removed"].size(),
                  one["kept"].size());
      if (!one.value("error", "").empty()) {
        std::fprintf(stderr, "agentgate: %s\n", one.value("error", "").c_str());
      }
    }
  });
  return exit;
}

int status(const Context& context) {
  int exit = 0;
  const auto answer = ask(context, "GET", "/v1/status", {}, exit);
  if (!answer) return exit;
  show(context, *answer, [](const ordered_json& root) {
    std::printf("%s\n", root.value("ready", false)
                            ? "ready"
                            : ("NOT READY: " + root.value("failure", "")).c_str());
    std::printf("%-15s %-15s %-20s %-9s %-24s %s\n", "PORT", "NETWORK", "ADDRESS", "STATE",
                "CONTAINER", "POLICY");
    for (const auto& endpoint : root.value("endpoints", ordered_json::array())) {
      const auto release = endpoint.value("release", ordered_json());
      std::printf(
          "%-15s %-15s %-20s %-9s %-24s %s\n", endpoint.value("port", "").c_str(),
          endpoint.value("network", "").substr(0, 12).c_str(),
          endpoint["address4"].is_string() ? endpoint["address4"].get<std::string>().c_str() : "-",
          endpoint.value("state", "").c_str(),
          release.is_object() ? release.value("container_name", "").c_str() : "-",
          release.is_object() ? release.value("policy", "").c_str() : "-");
    }
    for (const auto& incident : root.value("incidents", ordered_json::array())) {
      std::printf("incident %s\n", incident.get<std::string>().c_str());
    }
  });
  return exit;
}

int doctor(const Context& context) {
  int exit = 0;
  const auto answer = ask(context, "GET", "/v1/doctor", {}, exit);
  if (!answer) return exit;
  show(context, *answer, [](const ordered_json& root) {
    for (const auto& finding : root.value("findings", ordered_json::array())) {
      std::printf("%-8s %-24s %s\n", finding.value("outcome", "").c_str(),
                  finding.value("check", "").c_str(), finding.value("seen", "").c_str());
      if (!finding.value("mend", "").empty()) {
        std::printf("%-8s %-24s mend: %s\n", "", "", finding.value("mend", "").c_str());
      }
    }
  });
  return exit;
}

int version(const Context& context) {
  std::printf("agentgate %s\n", AGENTGATE_VERSION);
  int exit = 0;
  const auto answer = ask(context, "GET", "/v1/version", {}, exit);
  if (!answer) return exit;
  std::printf("agentgated %s, API %d\n", answer->value("version", "").c_str(),
              answer->value("api", 0));
  return 0;
}

int policy_check(const Context& context, const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) {
    std::cerr << "agentgate: " << file << " cannot be read\n";
    return kUsage;
  }
  std::stringstream text;
  text << stream.rdbuf();
  std::string name = std::filesystem::path(file).stem().string();
  agentgate::policy::ParseResult result = agentgate::policy::parse(text.str(), name, file);
  if (const auto good = agentgate::check_policy_name(name); !good) {
    result.errors.push_back(file + ": " + good.error().text);
  }
  const auto& policy = result.policy;
  const bool ok = result.errors.empty();
  if (context.json) {
    ordered_json names = ordered_json::array();
    for (const auto& rule : policy.names) names.push_back(rule.name);
    std::cout << ordered_json({{"version", 1},
                               {"policy", name},
                               {"ok", ok},
                               {"exit", ok ? 0 : 1},
                               {"errors", result.errors},
                               {"warnings", result.warnings},
                               {"names", names},
                               {"prefixes", policy.prefixes.size()},
                               {"private", policy.private_rules.size()},
                               {"deny", policy.deny.size()}})
                     .dump(2)
              << "\n";
  } else {
    for (const auto& error : result.errors) std::cerr << error << "\n";
    if (ok) {
      std::printf("%s: good (%zu names, %zu prefixes, %zu private, %zu deny, %zu resolvers)\n",
                  file.c_str(), policy.names.size(), policy.prefixes.size(),
                  policy.private_rules.size(), policy.deny.size(), policy.resolvers.size());
    }
  }
  return ok ? 0 : 1;
}

int policy_list(const std::string& directory) {
  const auto names = agentgate::policy::list(directory);
  if (!names) {
    std::cerr << "agentgate: " << names.error().to_string() << "\n";
    return 1;
  }
  int exit = 0;
  std::vector<std::string> all = *names;
  if (std::find(all.begin(), all.end(), "default") == all.end()) {
    all.insert(all.begin(), "default");
  }
  for (const std::string& name : all) {
    const auto loaded = agentgate::policy::load(directory, name);
    std::printf("%-32s %s\n", name.c_str(),
                loaded ? ("revision " + loaded->revision).c_str() : "BROKEN");
    if (!loaded) {
      std::cerr << loaded.error().text << "\n";
      exit = 1;
    }
  }
  return exit;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Closed containers, released by policy. See agentgate(1).", "agentgate");
  Context context;
  app.add_option("--socket", context.socket, "control socket of the daemon")
      ->envname("AGENTGATE_CONTROL_SOCKET")
      ->capture_default_str();
  app.add_option("--timeout", context.timeout, "seconds to wait for the daemon")
      ->check(CLI::Range(1U, 3600U))
      ->capture_default_str();
  app.add_flag("--json", context.json, "print the answer as JSON");
  app.require_subcommand(1);
  app.fallthrough();  // --json and the like may stand after the command
  std::function<int()> work;

  std::vector<std::string> containers;
  std::string policy;
  auto* arm = app.add_subcommand("arm", "verify a paused container and release its port");
  arm->add_option("container", containers, "names or ids")->required();
  arm->add_option("--policy", policy, "policy to use instead of the endpoint's or network's");
  arm->callback(
      [&] { work = [&] { return each_container(context, containers, "/v1/arm", policy); }; });

  auto* disarm = app.add_subcommand("disarm", "close a container's port, live flows included");
  disarm->add_option("container", containers, "names or ids")->required();
  disarm->callback(
      [&] { work = [&] { return each_container(context, containers, "/v1/disarm", ""); }; });

  auto* check = app.add_subcommand("check", "say what a container's port is, from the kernel");
  check->add_option("container", containers, "names or ids")->required();
  check->callback(
      [&] { work = [&] { return each_container(context, containers, "/v1/check", ""); }; });

  auto* refresh_command =
      app.add_subcommand("refresh", "resolve names again and update policies in use");
  bool all = false;
  auto* only = refresh_command->add_option("--policy", policy, "this policy only");
  refresh_command->add_flag("--all", all, "every policy in use (the default)")->excludes(only);
  refresh_command->callback([&] { work = [&] { return refresh(context, policy); }; });

  app.add_subcommand("status", "list networks and ports")->callback([&] {
    work = [&] { return status(context); };
  });
  app.add_subcommand("doctor", "say what of kernel, engine and host is missing")->callback([&] {
    work = [&] { return doctor(context); };
  });
  app.add_subcommand("version", "print the versions of command and daemon")->callback([&] {
    work = [&] { return version(context); };
  });

  auto* policies = app.add_subcommand("policy", "work with policy files; needs no daemon");
  policies->require_subcommand(1);
  std::string file;
  std::string directory = "/etc/agentgate/policies";
  auto* policy_check_command =
      policies->add_subcommand("check", "parse a policy file and report all its errors");
  policy_check_command->add_option("file", file, "policy file")->required();
  policy_check_command->callback([&] { work = [&] { return policy_check(context, file); }; });
  auto* policy_list_command = policies->add_subcommand("list", "list the policies of a directory");
  policy_list_command->add_option("--policy-directory", directory)
      ->envname("AGENTGATE_POLICY_DIRECTORY")
      ->capture_default_str();
  policy_list_command->callback([&] { work = [&] { return policy_list(directory); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kUsage;
  }
  return work ? work() : kUsage;
}

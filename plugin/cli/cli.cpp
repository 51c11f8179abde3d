// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "plugin/cli/plugin_call.h"
#include "plugin/cli/render.h"
#include "plugin/cli/run.h"
#include "plugin/http/client.h"
#include "plugin/policy/policy.h"

namespace agentgate::cli {
namespace {

using nlohmann::json;
using Render = std::string (*)(const json&);

struct Settings {
  bool as_json = false;
  std::string socket = "/run/agentgate/agentgate.sock";
  double timeout = 60;  // seconds
  std::string policy_directory = "/etc/agentgate/policies";
};

class Session {
 public:
  Session(const Settings& settings, std::ostream& out, std::ostream& err)
      : settings_(settings), out_(out), err_(err) {}

  // Asks, prints, and returns the answer's own "exit", or what stands for it.
  int ask(const char* method, const std::string& path, const json& body, Render render) {
    const auto timeout = std::chrono::milliseconds(static_cast<long>(settings_.timeout * 1000));
    const auto got = http::request(settings_.socket, method, path,
                                   body.is_null() ? std::string() : body.dump(), timeout);
    if (!got) return unreachable(got.error());
    const json answer = json::parse(got->body, nullptr, false);
    if (!answer.is_object()) {
      err_ << "agentgate: the daemon's answer is not JSON (status " << got->status << ")\n";
      return kExitUnreachable;
    }
    if (answer.contains("error")) return refused(answer["error"], got->status);
    if (settings_.as_json) {
      out_ << got->body << "\n";
    } else {
      out_ << render(answer);
    }
    const auto exit = answer.find("exit");
    if (exit != answer.end() && exit->is_number_integer()) return exit->get<int>();
    return got->status == 200 ? 0 : 1;
  }

 private:
  int unreachable(const Error& error) {
    err_ << "agentgate: " << error.to_string() << "\n";
    if (error.code == ENOENT || error.code == ECONNREFUSED) {
      err_ << "agentgate: is agentgated running? (systemctl status agentgated)\n";
    } else if (error.code == EACCES) {
      err_ << "agentgate: be root or a member of the group agentgate\n";
    }
    return kExitUnreachable;
  }

  int refused(const json& error, int status) {
    const auto text = [&](const char* key) {
      return error.is_object() && error.contains(key) && error[key].is_string()
                 ? error[key].get<std::string>()
                 : std::string();
    };
    err_ << "agentgate: " << text("field") << ": " << text("text") << "\n";
    return status == 400 ? kExitUsage : kExitUnreachable;
  }

  const Settings& settings_;
  std::ostream& out_;
  std::ostream& err_;
};

int check_policy_file(const Settings& settings, const std::string& file, std::ostream& out,
                      std::ostream& err) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream || std::filesystem::is_directory(file)) {
    err << "agentgate: " << file << ": cannot be read\n";
    return kExitUsage;
  }
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  const std::string name = std::filesystem::path(file).stem().string();
  const policy::ParseResult result = policy::parse(text, name, file);
  const bool good = result.errors.empty();
  if (settings.as_json) {
    out << json{{"version", 1},
                {"file", file},
                {"policy", name},
                {"revision", result.policy.revision},
                {"ok", good},
                {"errors", result.errors},
                {"warnings", result.warnings},
                {"exit", good ? 0 : 1}}
               .dump(-1, ' ', false, json::error_handler_t::replace)
        << "\n";
  } else {
    for (const auto& error : result.errors) err << error << "\n";
    for (const auto& warning : result.warnings) err << "warning: " << warning << "\n";
    if (good) {
      out << file << ": policy " << name << " is good (" << result.policy.names.size() << " names, "
          << result.policy.prefixes.size() << " prefixes, revision " << result.policy.revision
          << ")\n";
    }
  }
  return good ? 0 : 1;
}

int list_policies(const Settings& settings, std::ostream& out, std::ostream& err) {
  const auto names = policy::list(settings.policy_directory);
  if (!names) {
    err << "agentgate: " << names.error().to_string() << "\n";
    return 1;
  }
  json rows = json::array();
  std::string text;
  int worst = 0;
  const auto add = [&](const std::string& name) {
    const auto loaded = policy::load(settings.policy_directory, name);
    rows.push_back({{"policy", name},
                    {"ok", loaded.has_value()},
                    {"revision", loaded ? loaded->revision : ""},
                    {"description", loaded ? loaded->description : ""},
                    {"error", loaded ? "" : loaded.error().text}});
    text += name +
            (loaded ? "  " + loaded->revision + "  " + loaded->description
                    : "  refused: " + loaded.error().to_string()) +
            "\n";
    if (!loaded) worst = 1;
  };
  for (const auto& name : *names) add(name);
  if (std::find(names->begin(), names->end(), "default") == names->end()) add("default");
  if (settings.as_json) {
    out << json{{"version", 1}, {"policies", rows}, {"exit", worst}}.dump(
               -1, ' ', false, json::error_handler_t::replace)
        << "\n";
  } else {
    out << text;
  }
  return worst;
}

// Where "run" stands among the words, if it is the command: all that follows is Docker's.
std::size_t find_run(const std::vector<std::string>& words) {
  for (std::size_t at = 0; at < words.size(); ++at) {
    if (words[at] == "run") return at;
    if (words[at] == "--socket" || words[at] == "--timeout")
      ++at;
    else if (words[at].empty() || words[at][0] != '-')
      break;
  }
  return words.size();
}

// Docker's client asks as cobra's completion does: one word on each line with what it means, then
// how to go on; 4: with no file names.
int complete(const CLI::App& app, const std::vector<std::string>& words, std::ostream& out) {
  const CLI::App* at = &app;
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    for (const CLI::App* below : at->get_subcommands({})) {
      if (below->get_name() == words[i]) {
        at = below;
        break;
      }
    }
  }
  const std::string begun = words.empty() ? std::string() : words.back();
  const auto offer = [&](const std::string& word, const std::string& meaning) {
    if (word.rfind(begun, 0) == 0) out << word << "\t" << meaning << "\n";
  };
  if (begun.empty() || begun[0] != '-') {
    for (const CLI::App* below : at->get_subcommands({})) {
      offer(below->get_name(), below->get_description());
    }
  } else {
    for (const CLI::Option* option : at->get_options()) {
      for (const auto& name : option->get_lnames()) offer("--" + name, option->get_description());
    }
  }
  out << ":4\n";
  return 0;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

}  // namespace

int run(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  Settings settings;
  std::vector<std::string> containers;
  std::vector<std::string> files;
  std::string policy;
  bool all = false;
  const PluginCall call =
      understand_call({argv, argv + argc}, variable("DOCKER_CLI_PLUGIN_ORIGINAL_CLI_COMMAND"));
  if (call.kind == PluginCall::Kind::kMetadata) {
    out << plugin_metadata() << "\n";
    return 0;
  }

  CLI::App app{"Verifies containers on agentgate networks and releases what their policy allows.",
               call.name};
  app.require_subcommand(1);
  app.fallthrough();
  app.add_flag("--json", settings.as_json, "Print the answer as JSON, one line for each");
  app.add_option("--socket", settings.socket, "The daemon's control socket")
      ->envname("AGENTGATE_CONTROL_SOCKET")
      ->capture_default_str();
  app.add_option("--timeout", settings.timeout, "Seconds to wait for an answer")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.footer(
      "Exit codes: 0 done; 1 refused, still closed; 2 release undone, closed again;\n"
      "3 check found an inconsistent port; 4 the daemon cannot be reached; 64 usage.");

  std::string wait_ready;
  std::vector<std::string> image;
  auto* run_command =
      app.add_subcommand("run", "Create, start, pause, arm and unpause a container in one step");
  run_command->footer(
      "All options of docker run may stand before IMAGE, too. If no network is named, the only\n"
      "agentgate network is taken. A container that is not released is removed.\n"
      "Exit codes: the container's; 121 refused; 122 release undone; 124 the daemon cannot be\n"
      "reached; 125, 126, 127 as docker run.");
  run_command->set_help_flag("--help", "Print this help message and exit");  // -h is docker's
  // For the help alone: what follows "run" is parsed in run_arguments.cpp.
  run_command->add_option("--policy", policy, "Policy, instead of the endpoint's or network's");
  run_command->add_option(
      "--wait-ready", wait_ready,
      "How long to wait for the daemon, and for the container to run (30s, 2m)");
  run_command->add_option("IMAGE", image, "The image, then the command and its arguments");
  auto* arm = app.add_subcommand("arm", "Verify paused containers and release them");
  arm->add_option("NAME", containers, "Names or ids, one after the other")->required();
  arm->add_option("--policy", policy, "Policy, instead of the endpoint's or network's");
  auto* disarm = app.add_subcommand("disarm", "Close containers again; their live flows are cut");
  disarm->add_option("NAME", containers, "Names or ids")->required();
  auto* check =
      app.add_subcommand("check", "Say whether containers are closed, released or inconsistent");
  check->add_option("NAME", containers, "Names or ids")->required();
  auto* refresh = app.add_subcommand("refresh", "Read policies and resolve their names again");
  auto* only = refresh->add_option("--policy", policy, "Only this policy");
  refresh->add_flag("--all", all, "All policies in use (as without an option)")->excludes(only);
  auto* status = app.add_subcommand("status", "Networks, endpoints and what happened");
  auto* health = app.add_subcommand("health", "Whether the daemon is well");
  auto* doctor = app.add_subcommand("doctor", "What kernel, engine and host lack, and the mend");
  auto* version = app.add_subcommand("version", "Versions of this program and the daemon");
  auto* policies = app.add_subcommand("policy", "Policy files (needs no daemon)");
  policies->require_subcommand(1);
  auto* policy_check = policies->add_subcommand("check", "Validate policy files");
  policy_check->add_option("FILE", files, "Policy files")->required();
  auto* policy_list = policies->add_subcommand("list", "The policies of a directory");
  policy_list->add_option("--policy-directory", settings.policy_directory)
      ->envname("AGENTGATE_POLICY_DIRECTORY")
      ->capture_default_str();

  if (call.kind == PluginCall::Kind::kComplete) return complete(app, call.arguments, out);
  // What follows "run" is parsed elsewhere.
  const std::size_t run_at = find_run(call.arguments);
  const std::vector<std::string> run_words(
      call.arguments.begin() +
          static_cast<std::ptrdiff_t>(std::min(run_at + 1, call.arguments.size())),
      call.arguments.end());
  const auto parse = [&](std::vector<std::string> words) {
    std::reverse(words.begin(), words.end());  // as CLI11 wants it
    try {
      app.parse(std::move(words));
    } catch (const CLI::ParseError& error) {
      return std::optional<int>(app.exit(error, out, err) == 0 ? 0 : kExitUsage);
    }
    return std::optional<int>();
  };
  const bool help_alone = !run_words.empty() && run_words.front() == "--help";
  std::vector<std::string> ours(
      call.arguments.begin(),
      call.arguments.end() - static_cast<std::ptrdiff_t>(help_alone ? 0 : run_words.size()));
  if (const auto done = parse(ours)) return *done;

  if (*run_command) {
    const RunContext context{call.docker, settings.socket,
                             std::chrono::milliseconds(static_cast<long>(settings.timeout * 1000)),
                             settings.as_json, variable("DOCKER_CLI_PLUGIN_SOCKET")};
    const int code = run_container(context, run_words, out, err);
    if (code != kRunHelp) return code;
    ours.emplace_back("--help");
    return parse(ours).value_or(0);
  }
  Session session(settings, out, err);
  // The worst of several; a daemon that is gone is not asked again.
  const auto for_each_container = [&](const std::string& path) {
    int worst = 0;
    for (const std::string& container : containers) {
      json body{{"container", container}};
      if (!policy.empty()) body["policy"] = policy;
      worst = std::max(worst, session.ask("POST", path, body, render_report));
      if (worst == kExitUnreachable) break;
    }
    return worst;
  };
  try {
    if (*arm) return for_each_container("/v1/arm");
    if (*disarm) return for_each_container("/v1/disarm");
    if (*check) return for_each_container("/v1/check");
    if (*refresh) {
      json body = json::object();
      if (!policy.empty()) body["policy"] = policy;
      return session.ask("POST", "/v1/refresh", body, render_refresh);
    }
    if (*status) return session.ask("GET", "/v1/status", nullptr, render_status);
    if (*health) return session.ask("GET", "/v1/health", nullptr, render_health);
    if (*doctor) return session.ask("GET", "/v1/doctor", nullptr, render_doctor);
    if (*version) {
      if (!settings.as_json) out << "agentgate " << AGENTGATE_VERSION << "\n";
      return session.ask("GET", "/v1/version", nullptr, [](const json& answer) {
        const json known = answer.value("version", json());
        return "agentgated " + (known.is_string() ? known.get<std::string>() : "?") + "\n";
      });
    }
    int worst = 0;
    if (*policy_check) {
      for (const auto& file : files) {
        worst = std::max(worst, check_policy_file(settings, file, out, err));
      }
      return worst;
    }
    if (*policy_list) return list_policies(settings, out, err);
  } catch (const std::exception& error) {
    err << "agentgate: " << error.what() << "\n";
    return kExitUsage;
  }
  return kExitUsage;
}

}  // namespace agentgate::cli

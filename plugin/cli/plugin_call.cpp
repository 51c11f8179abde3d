// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/plugin_call.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

namespace agentgate::cli {
namespace {

constexpr const char* kPluginName = "docker-agentgate";
constexpr std::array<std::string_view, 9> kClientOptionsWithValue{
    "-H", "--host", "-c", "--context", "-l", "--log-level", "--tlscacert", "--tlscert", "--tlskey",
};
constexpr std::array<std::string_view, 4> kClientFlags{"-D", "--debug", "--tls", "--tlsverify"};

// How many words from `at` on are one option of Docker's client; 0 if it is none.
std::size_t client_option(const std::vector<std::string>& words, std::size_t at) {
  const std::string_view word = words[at];
  const auto is = [&](std::string_view option) { return word == option; };
  const auto joined = [&](std::string_view option) {  // --host=X, -H=X and -HX
    if (word.substr(0, option.size()) != option || word == option) return false;
    return option[1] != '-' || word[option.size()] == '=';
  };
  const auto either = [&](std::string_view option) { return is(option) || joined(option); };
  if (std::any_of(kClientFlags.begin(), kClientFlags.end(), either)) return 1;
  if (either("--config")) return is("--config") ? 2 : 1;
  const auto* const with_value =
      std::find_if(kClientOptionsWithValue.begin(), kClientOptionsWithValue.end(), either);
  if (with_value == kClientOptionsWithValue.end()) return 0;
  return is(*with_value) ? 2 : 1;
}

}  // namespace

PluginCall understand_call(const std::vector<std::string>& argv,
                           const std::string& original_client) {
  PluginCall call;
  const std::string program =
      argv.empty() ? "" : std::filesystem::path(argv.front()).filename().string();
  if (program != kPluginName) {
    if (argv.size() > 1) call.arguments.assign(argv.begin() + 1, argv.end());
    return call;
  }
  call.name = "docker agentgate";
  // While it completes, Docker's client gives the plugin's own path there.
  if (!original_client.empty() &&
      std::filesystem::path(original_client).filename().string() != kPluginName) {
    call.docker = {original_client};
  }
  std::size_t at = 1;
  const auto take_client_options = [&] {
    while (at < argv.size()) {
      const std::size_t words = client_option(argv, at);
      if (words == 0 || at + words > argv.size()) return;
      call.docker.insert(call.docker.end(), argv.begin() + static_cast<std::ptrdiff_t>(at),
                         argv.begin() + static_cast<std::ptrdiff_t>(at + words));
      at += words;
    }
  };
  take_client_options();
  bool help = false;
  if (at < argv.size()) {
    const std::string& word = argv[at];
    if (word == "docker-cli-plugin-metadata") {
      call.kind = PluginCall::Kind::kMetadata;
      return call;
    }
    if (word == "__complete" || word == "__completeNoDesc") {
      call.kind = PluginCall::Kind::kComplete;
      ++at;
    } else if (word == "help") {
      help = true;
      ++at;
    }
  }
  if (at < argv.size() && argv[at] == "agentgate") ++at;
  if (call.kind == PluginCall::Kind::kCommand) take_client_options();
  call.arguments.assign(argv.begin() + static_cast<std::ptrdiff_t>(std::min(at, argv.size())),
                        argv.end());
  if (help) call.arguments.emplace_back("--help");
  return call;
}

std::string plugin_metadata() {
  return nlohmann::json{
      {"SchemaVersion", "0.1.0"},
      {"Vendor", "agentgate"},
      {"Version", AGENTGATE_VERSION},
      {"ShortDescription", "Containers that start closed and are released by policy"},
      {"URL", "file:///usr/share/doc/agentgate"}}
      .dump();
}

}  // namespace agentgate::cli

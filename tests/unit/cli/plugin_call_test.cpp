// SPDX-License-Identifier: GPL-2.0-or-later
//
// Argument lists as Docker's clients 20.10, 26.1 and 28.5 pass them.
#include "plugin/cli/plugin_call.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace agentgate::cli {
namespace {

using Words = std::vector<std::string>;
using Kind = PluginCall::Kind;
constexpr const char* kPlugin = "/usr/libexec/docker/cli-plugins/docker-agentgate";

PluginCall as_plugin(Words words, const std::string& original = "") {
  words.insert(words.begin(), kPlugin);
  return understand_call(words, original);
}

TEST(PluginCallTest, ByItsOwnNameNothingIsTaken) {
  const auto call = understand_call({"/usr/bin/agentgate", "-H", "x", "agentgate"}, "docker");
  EXPECT_EQ(call.name, "agentgate");
  EXPECT_EQ(call.arguments, (Words{"-H", "x", "agentgate"}));
  EXPECT_EQ(call.docker, Words{"docker"});
  EXPECT_TRUE(understand_call({}, "").arguments.empty());
}

TEST(PluginCallTest, ThePluginsNameIsTaken) {
  const auto call = as_plugin({"agentgate", "arm", "a1"});
  EXPECT_EQ(call.kind, Kind::kCommand);
  EXPECT_EQ(call.name, "docker agentgate");
  EXPECT_EQ(call.arguments, (Words{"arm", "a1"}));
  EXPECT_TRUE(as_plugin({}).arguments.empty());
}

TEST(PluginCallTest, OptionsOfTheClientAreHandedOn) {
  for (const Words& options : std::vector<Words>{{"-H", "tcp://h:1"},
                                                 {"-Htcp://h:1"},
                                                 {"--host=tcp://h:1"},
                                                 {"--host", "agentgate"},
                                                 {"-c", "ctx"},
                                                 {"--context=ctx", "-D"},
                                                 {"--config", "/etc/x"},
                                                 {"--config=/etc/x"},
                                                 {"-l", "info", "--debug"},
                                                 {"--log-level=info"},
                                                 {"--tls", "--tlscacert", "a", "--tlscert=b"},
                                                 {"--tlsverify=false", "--tlskey", "k"}}) {
    for (const bool before : {true, false}) {
      Words words = options;
      words.insert(before ? words.end() : words.begin(), "agentgate");
      words.emplace_back("status");
      const auto call = as_plugin(words, "/usr/bin/docker");
      Words expected = options;
      expected.insert(expected.begin(), "/usr/bin/docker");
      EXPECT_EQ(call.docker, expected);
      EXPECT_EQ(call.arguments, Words{"status"}) << options[0];
    }
  }
}

TEST(PluginCallTest, OptionsAfterTheCommandAreNotTheClients) {
  const auto call = as_plugin({"agentgate", "run", "-c", "512", "-l", "a=b", "img"});
  EXPECT_EQ(call.docker, Words{"docker"});
  EXPECT_EQ(call.arguments, (Words{"run", "-c", "512", "-l", "a=b", "img"}));
  EXPECT_EQ(as_plugin({"agentgate", "--config-file", "x"}).arguments,
            (Words{"--config-file", "x"}));
}

TEST(PluginCallTest, TheClientThatCalled) {
  EXPECT_EQ(as_plugin({"agentgate"}, "/opt/docker").docker, Words{"/opt/docker"});
  // What Docker's client says while it completes.
  EXPECT_EQ(as_plugin({"agentgate"}, kPlugin).docker, Words{"docker"});
}

TEST(PluginCallTest, HelpMetadataCompletion) {
  EXPECT_EQ(as_plugin({"help", "agentgate"}).arguments, Words{"--help"});
  EXPECT_EQ(as_plugin({"help", "agentgate", "arm"}).arguments, (Words{"arm", "--help"}));
  EXPECT_EQ(as_plugin({"docker-cli-plugin-metadata"}).kind, Kind::kMetadata);
  const auto call = as_plugin({"__complete", "agentgate", "arm", ""});
  EXPECT_EQ(call.kind, Kind::kComplete);
  EXPECT_EQ(call.arguments, (Words{"arm", ""}));
  // Only Docker's client asks for these: by its own name the program knows no such command.
  EXPECT_EQ(understand_call({"agentgate", "docker-cli-plugin-metadata"}, "").kind, Kind::kCommand);
}

TEST(PluginCallTest, Metadata) {
  const auto metadata = nlohmann::json::parse(plugin_metadata());
  EXPECT_EQ(metadata["SchemaVersion"], "0.1.0");
  EXPECT_EQ(metadata["Version"], AGENTGATE_VERSION);
  for (const char* key : {"Vendor", "ShortDescription", "URL"}) {
    EXPECT_FALSE(metadata[key].get<std::string>().empty()) << key;
  }
}

}  // namespace
}  // namespace agentgate::cli

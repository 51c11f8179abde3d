// SPDX-License-Identifier: GPL-2.0-or-later
//
// How the program was called: by its own name, or by Docker's client as the plugin of
// `docker agentgate ...`. Pure; runs nothing.
//
// Docker's client calls `docker-agentgate [its own options] agentgate COMMAND ...`, for
// `docker help agentgate ...` `docker-agentgate help agentgate ...`, and for completion
// `docker-agentgate __complete agentgate ... WORD`. Its own options say which engine is meant, so
// they are handed on to every client that we start.
#pragma once

#include <string>
#include <vector>

namespace agentgate::cli {

struct PluginCall {
  enum class Kind { kCommand, kMetadata, kComplete };
  Kind kind = Kind::kCommand;
  std::string name = "agentgate";             // in usage lines
  std::vector<std::string> docker{"docker"};  // the client to call, with its options
  std::vector<std::string> arguments;         // what is left for the command line
};

// `original_client` is DOCKER_CLI_PLUGIN_ORIGINAL_CLI_COMMAND, by which Docker's client says what
// it was called as; empty when it is not set.
[[nodiscard]] PluginCall understand_call(const std::vector<std::string>& argv,
                                         const std::string& original_client);

// The answer to docker-cli-plugin-metadata.
[[nodiscard]] std::string plugin_metadata();

}  // namespace agentgate::cli

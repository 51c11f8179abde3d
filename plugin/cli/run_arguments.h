// SPDX-License-Identifier: GPL-2.0-or-later
//
// The words after `agentgate run`: our own options, those of `docker run` that `docker create`
// does not take, and the rest, which goes to `docker create` as it stands.
//
// To know where IMAGE is, one must know which options take a value. The client that will run is
// asked for that (`docker run --help`), so that an option that is new there needs no change here.
// An option that its help hides takes a value, as all of those do that ever were hidden but two.
// Pure.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "netdriver/error.h"

namespace agentgate::cli {

// Options of `docker run` that take no value, and the long names of short ones.
struct DockerFlags {
  std::set<std::string> without_value;  // long names, without dashes
  std::map<char, std::string> short_names;
};
[[nodiscard]] DockerFlags parse_docker_help(const std::string& help);

struct RunArguments {
  // Ours.
  bool help = false;
  std::string policy;
  std::optional<std::chrono::milliseconds> wait_ready;
  // Those of `docker run` alone.
  bool detach = false;
  std::string detach_keys;
  // Noted, and handed on.
  bool interactive = false;
  bool tty = false;
  bool network = false;  // one was given
  std::string cidfile;
  std::set<std::string> attach;
  // For `docker create`: options, IMAGE and what follows it.
  std::vector<std::string> create;
};

// Errors: wrong usage, with code EINVAL.
[[nodiscard]] Result<RunArguments> parse_run(const std::vector<std::string>& words,
                                             const DockerFlags& flags);

// "500ms", "1m30s", "2h", or a number of seconds.
[[nodiscard]] std::optional<std::chrono::milliseconds> parse_duration(const std::string& text);

}  // namespace agentgate::cli

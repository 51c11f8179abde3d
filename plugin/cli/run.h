// SPDX-License-Identifier: GPL-2.0-or-later
//
// `agentgate run`: create, start, pause, arm and unpause in one step (docs/run.md).
//
// Docker's client does what concerns the engine, so that its contexts, TLS, credentials and every
// option of `docker run` are as they always are; the daemon is asked over the control socket.
// Invariants:
//   - nothing is started whose only network is not of our driver: it would not be closed;
//   - the container is unpaused only after a release;
//   - whatever fails or interrupts before that, the container is closed again if it may have been
//     released, and removed. If this program is killed, what it leaves behind is closed, or
//     released and paused.
// In the foreground `docker start --attach` is started before the pause, so that no output and no
// exit code is lost; it stays until the container ends, and its exit code is ours.
// Threading: single-threaded; signals are blocked while it runs.
#pragma once

#include <chrono>
#include <iosfwd>
#include <string>
#include <vector>

namespace agentgate::cli {

// Exit codes, beside the container's own. 120 and the code that `agentgate arm` would have had;
// from 125 on as `docker run` has them.
inline constexpr int kRunRefused = 121;
inline constexpr int kRunUndone = 122;
inline constexpr int kRunUnreachable = 124;
inline constexpr int kRunFailed = 125;
inline constexpr int kRunNotExecutable = 126;
inline constexpr int kRunNotFound = 127;

inline constexpr int kRunHelp = -1;  // no exit code: help was asked for

struct RunContext {
  std::vector<std::string> docker{"docker"};  // the client, with options that go before a command
  std::string socket;
  std::chrono::milliseconds timeout{60000};  // of a request to the daemon
  bool as_json = false;
  std::string stop_socket;  // DOCKER_CLI_PLUGIN_SOCKET
};

// `words`: what follows "run". `out` gets the id with -d, `err` all that is said.
int run_container(const RunContext& context, const std::vector<std::string>& words,
                  std::ostream& out, std::ostream& err);

}  // namespace agentgate::cli

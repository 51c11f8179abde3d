// SPDX-License-Identifier: GPL-2.0-or-later
//
// Child processes, and the signals meanwhile.
//
// A Signals object blocks the signals that would end or must reach somebody, and gives them to
// the program in order. Children get the mask that was before. Also counts as
// a signal: the end of the socket by which Docker's client tells a plugin to stop.
// Threading: one thread for each Child; make one Signals at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <vector>

#include "netdriver/error.h"
#include "netdriver/unique_fd.h"

namespace agentgate::process {

class Signals {
 public:
  // `stop_socket`: DOCKER_CLI_PLUGIN_SOCKET, or empty.
  explicit Signals(const std::string& stop_socket);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] int stop_fd() const { return stop_.get(); }  // -1: none, or it has ended
  [[nodiscard]] const sigset_t& previous_mask() const { return previous_; }
  // The next one that is there, without waiting.
  std::optional<int> next();

 private:
  sigset_t previous_{};
  netdriver::UniqueFd fd_, stop_;
};

struct Exit {
  int code = 0;  // 128 + signal for one that was killed
};

// One child. Its standard output and error are the program's own unless they are captured.
class Child {
 public:
  enum class Output { kInherit, kCapture };
  enum class Input { kNone, kInherit, kPump };
  // In a group of its own the terminal's signals do not reach it.
  enum class Group { kOwn, kShared };
  struct Options {
    Output out = Output::kCapture;
    Output err = Output::kInherit;
    Group group = Group::kOwn;
    // kPump: our input is read and handed on while wait() runs. A child in a group of its own
    // cannot read the terminal itself.
    Input input = Input::kNone;
  };

  // `signals`: whose previous mask it gets; none: the calling thread's.
  static Result<Child> start(const std::vector<std::string>& argv, const Options& options,
                             const Signals* signals);
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();  // one that still runs is killed

  // Waits until it has ended (Exit), a signal came (nullopt), or the time is over (nullopt).
  // With `signals` null, signals wait. `tee_err`: captured error output is also written on.
  std::optional<Exit> wait(const Signals* signals, std::optional<std::chrono::milliseconds> limit,
                           bool tee_err = false);
  void kill(int signal) const;
  // SIGTERM, and SIGKILL to one that does not care.
  Exit end();

  [[nodiscard]] const std::string& out() const { return out_text_; }
  [[nodiscard]] const std::string& err() const { return err_text_; }

 private:
  Child() = default;
  void pump(short our_input, short its_input);
  void read_from(netdriver::UniqueFd& fd, std::string& text, bool tee);
  Exit reap();

  pid_t pid_ = -1;
  bool own_group_ = true;
  netdriver::UniqueFd pidfd_, in_, out_, err_;
  std::string in_text_, out_text_, err_text_;  // in_text_: read, and not yet written
};

}  // namespace agentgate::process

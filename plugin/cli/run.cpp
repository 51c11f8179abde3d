// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/run.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <sstream>
#include <utility>

#include "plugin/cli/render.h"
#include "plugin/cli/run_arguments.h"
#include "plugin/http/client.h"
#include "plugin/process/process.h"

namespace agentgate::cli {
namespace {

using nlohmann::json;
using process::Child;
using process::Signals;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Words = std::vector<std::string>;

constexpr milliseconds kStartLimit{60000};    // until the container runs, without --wait-ready
constexpr milliseconds kCleanUpLimit{30000};  // for each command that cleans up
constexpr milliseconds kHealthLimit{2000};    // for one question whether the daemon is well

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

std::string trimmed(const std::string& text) {
  const std::size_t end = text.find_last_not_of(" \r\n");
  return end == std::string::npos ? std::string() : text.substr(0, end + 1);
}

Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!trimmed(line).empty()) lines.push_back(trimmed(line));
  }
  return lines;
}

// "agentgate", or the managed plugin's "agentgate:latest" and "registry/agentgate:1.0".
bool is_our_driver(const std::string& driver) {
  const std::string last = driver.substr(driver.find_last_of('/') + 1);
  return last.substr(0, last.find(':')) == "agentgate";
}

bool ends_us(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT;
}

// What `docker run` makes of the engine's reason for not starting a container.
int exit_of_start_error(const std::string& text) {
  if (contains(text, "executable file not found") || contains(text, "no such file or directory")) {
    return kRunNotFound;
  }
  if (contains(text, "permission denied") || contains(text, "is a directory")) {
    return kRunNotExecutable;
  }
  return kRunFailed;
}

std::string random_token() {
  std::array<unsigned char, 8> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return {};
  std::string text;
  for (const unsigned char byte : bytes) {
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", byte);
    text += hex.data();
  }
  return text;
}

class Run {
 public:
  Run(const RunContext& context, std::ostream& out, std::ostream& err)
      : context_(context), out_(out), err_(err), signals_(context.stop_socket) {}

  int operator()(const Words& words) {
    const int code = prepare(words);
    if (code != 0) return interrupted_ != 0 ? 128 + interrupted_ : code;
    const int made = create_and_release();
    if (made == 0) return arguments_.detach ? 0 : stay_attached();
    remove();
    return interrupted_ != 0 ? 128 + interrupted_ : made;
  }

 private:
  struct Answer {
    int code = 0;
    std::string out, err;
  };

  int say(int code, const std::string& text) {
    err_ << "agentgate: " << text << "\n";
    return code;
  }

  // A command of Docker's client. Nothing, when it could not be run or a signal ended it; that
  // has been said then.
  std::optional<Answer> docker(const Words& command, bool capture_err = true) {
    Child::Options options;
    if (capture_err) options.err = Child::Output::kCapture;
    auto child = start(command, options);
    if (!child) return std::nullopt;
    for (;;) {
      if (const auto ended = child->wait(&signals_, std::nullopt)) {
        // A terminal's signal may have met it before it left our process group.
        if (ended->code != 0 && interrupted()) return std::nullopt;
        return Answer{ended->code, child->out(), child->err()};
      }
      if (!interrupted()) continue;
      child->end();
      return std::nullopt;
    }
  }

  // The same while cleaning up: signals wait, and it does not take for ever.
  std::optional<Answer> docker_now(const Words& command) {
    Child::Options options;
    options.err = Child::Output::kCapture;
    auto child = start(command, options);
    if (!child) return std::nullopt;
    const auto ended = child->wait(nullptr, kCleanUpLimit);
    const int code = ended ? ended->code : child->end().code;
    return Answer{code, child->out(), child->err()};
  }

  std::optional<Child> start(const Words& command, const Child::Options& options) {
    Words argv = context_.docker;
    argv.insert(argv.end(), command.begin(), command.end());
    auto child = Child::start(argv, options, &signals_);
    if (!child) {
      say(0, child.error().to_string());
      return std::nullopt;
    }
    return std::move(*child);
  }

  // Whether a signal came that ends us.
  bool interrupted() {
    while (const auto signal = signals_.next()) {
      if (ends_us(*signal) && interrupted_ == 0) interrupted_ = *signal;
    }
    return interrupted_ != 0;
  }

  // False: a signal ended the pause.
  bool rest(milliseconds time) {
    std::array<pollfd, 2> fds{{{signals_.fd(), POLLIN, 0}, {signals_.stop_fd(), POLLIN, 0}}};
    (void)::poll(fds.data(), fds.size(), static_cast<int>(time.count()));
    return !interrupted();
  }

  // -- before there is a container --------------------------------------------------------------
  int prepare(const Words& words) {
    const auto help = docker({"run", "--help"});
    if (!help) return kRunFailed;
    if (help->code != 0) return say(kRunFailed, "docker run --help: " + trimmed(help->err));
    auto parsed = parse_run(words, parse_docker_help(help->out));
    if (!parsed) return say(kRunFailed, parsed.error().text);
    arguments_ = std::move(*parsed);
    if (arguments_.help) return kRunHelp;
    if (attaches_input() && arguments_.tty && ::isatty(STDIN_FILENO) == 0) {
      return say(kRunFailed, "-i and -t: the input is not a terminal");
    }
    if (const int code = wait_for_daemon(); code != 0) return code;
    return arguments_.network ? 0 : choose_network();
  }

  [[nodiscard]] bool attaches_input() const {
    return !arguments_.detach && arguments_.interactive &&
           (arguments_.attach.empty() || arguments_.attach.count("stdin") != 0);
  }

  // Asked before anything is created. One that answers but is not well decides at the arm.
  int wait_for_daemon() {
    const auto end = Clock::now() + arguments_.wait_ready.value_or(milliseconds(0));
    for (;;) {
      const auto got = http::request(context_.socket, "GET", "/v1/health", "",
                                     std::min(context_.timeout, kHealthLimit));
      if (got && got->status == 200) return 0;
      if (Clock::now() >= end) {
        if (got) return 0;
        return say(kRunUnreachable,
                   got.error().to_string() + "; nothing was created (is agentgated running?)");
      }
      if (!rest(milliseconds(100))) return kRunFailed;
    }
  }

  int choose_network() {
    const auto listed = docker({"network", "ls", "--format", "{{.Driver}} {{.Name}}"});
    if (!listed) return kRunFailed;
    if (listed->code != 0) return say(kRunFailed, trimmed(listed->err));
    Words ours;
    for (const auto& line : lines_of(listed->out)) {
      const std::size_t blank = line.find(' ');
      if (blank != std::string::npos && is_our_driver(line.substr(0, blank))) {
        ours.push_back(line.substr(blank + 1));
      }
    }
    if (ours.empty()) {
      return say(kRunFailed,
                 "there is no agentgate network; make one: docker network create -d agentgate "
                 "agents");
    }
    if (ours.size() > 1) {
      std::string names;
      for (const auto& name : ours) names += (names.empty() ? "" : ", ") + name;
      return say(kRunFailed, "choose one of the agentgate networks with --network: " + names);
    }
    network_ = ours.front();
    return 0;
  }

  // -- the five steps ---------------------------------------------------------------------------
  int create_and_release() {
    if (const int code = create(); code != 0) return code;
    if (const int code = check_networks(); code != 0) return code;
    if (const int code = arguments_.detach ? start_detached() : start_attached(); code != 0) {
      return code;
    }
    if (const int code = pause(); code != 0) return code;
    if (const int code = arm(); code != 0) return code;
    if (interrupted()) return kRunFailed;
    const auto unpaused = docker({"unpause", id_});
    if (!unpaused) return kRunFailed;
    if (unpaused->code != 0) return say(kRunFailed, trimmed(unpaused->err));
    if (arguments_.detach) out_ << id_ << std::endl;
    return 0;
  }

  int create() {
    token_ = random_token();
    if (token_.empty()) return say(kRunFailed, "no random number to be had");
    // By this label a container is found whose id the interrupted client did not print any more.
    Words command{"create", "--label", "agentgate.run=" + token_};
    if (!network_.empty()) command.insert(command.end(), {"--network", network_});
    // Else the engine would close the input after the first client that attaches and leaves.
    if (arguments_.detach && arguments_.interactive) {
      command.insert(command.end(), {"--attach", "stdout", "--attach", "stderr"});
    }
    command.insert(command.end(), arguments_.create.begin(), arguments_.create.end());
    const auto answer = docker(command, false);
    if (!answer) return kRunFailed;
    const Words lines = lines_of(answer->out);
    if (answer->code != 0 || lines.empty()) return kRunFailed;  // the client has said why
    id_ = lines.back();
    return 0;
  }

  // On another network than ours it would not be closed from the start.
  int check_networks() {
    const std::string format =
        "{{range $name, $network := .NetworkSettings.Networks}}{{println $name (index "
        "$network.DriverOpts \"agentgate.policy\")}}{{end}}";
    const auto seen = docker({"inspect", "--type", "container", "--format", format, id_});
    if (!seen) return kRunFailed;
    if (seen->code != 0) return say(kRunFailed, trimmed(seen->err));
    Words names;
    std::string policy;
    for (const auto& line : lines_of(seen->out)) {
      std::istringstream words(line);
      words >> names.emplace_back() >> policy;
    }
    std::string driver;
    if (names.size() == 1) {
      const auto asked =
          docker({"network", "inspect", "--format", "{{.Driver}} {{.ID}}", names[0]});
      if (!asked) return kRunFailed;
      if (asked->code != 0) return say(kRunFailed, trimmed(asked->err));
      std::istringstream words(asked->out);
      std::string id;
      words >> driver >> id;
      if (is_our_driver(driver)) return precheck(id, policy);
    }
    return say(kRunRefused,
               names.size() == 1
                   ? "network " + names[0] + " is of driver " + driver +
                         ", not agentgate; the container was not started"
                   : "the container must be on one agentgate network and no other; it was not "
                     "started");
  }

  // What an arm would refuse and Docker knows already: then its program does not run at all.
  // `policy`: the endpoint's own, which the daemon learns of only at the start.
  int precheck(const std::string& network, const std::string& policy) {
    json body{{"container", id_}, {"network", network}};
    if (!arguments_.policy.empty()) {
      body["policy"] = arguments_.policy;
    } else if (!policy.empty()) {
      body["policy"] = policy;
    }
    const auto got =
        http::request(context_.socket, "POST", "/v1/precheck", body.dump(), context_.timeout);
    if (!got) return say(kRunUnreachable, got.error().to_string());
    const json report = json::parse(got->body, nullptr, false);
    if (got->status != 200 || !report.is_object()) {
      return say(kRunRefused, "agentgated does not say whether it could be armed (HTTP " +
                                  std::to_string(got->status) + "); it was not started");
    }
    if (report.value("exit", json()) == json(0)) return 0;
    const std::string text = render_report(report);
    return say(kRunRefused, text.substr(0, text.find('\n')) + "; it was not started");
  }

  // Not waited for: the sooner the pause is asked for, the shorter the container runs before it.
  int start_detached() {
    Child::Options options;
    options.err = Child::Output::kCapture;
    client_ = start({"start", id_}, options);
    return client_ ? 0 : kRunFailed;
  }

  int start_attached() {
    Words command{"start", "--attach"};
    if (attaches_input()) command.emplace_back("--interactive");
    if (!arguments_.detach_keys.empty()) {
      command.insert(command.end(), {"--detach-keys", arguments_.detach_keys});
    }
    command.push_back(id_);
    Child::Options options;
    options.out = Child::Output::kInherit;
    options.err = Child::Output::kCapture;  // and written on: the client's own errors are there
    if (attaches_input()) {
      const bool terminal = ::isatty(STDIN_FILENO) != 0;
      options.input = terminal && !arguments_.tty ? Child::Input::kPump : Child::Input::kInherit;
      if (arguments_.tty) options.group = Child::Group::kShared;  // it reads the terminal itself
    }
    client_ = start(command, options);
    return client_ ? 0 : kRunFailed;
  }

  int pause() {
    const auto end = Clock::now() + arguments_.wait_ready.value_or(kStartLimit);
    for (;;) {
      const bool started = !client_;  // before this try
      const auto paused = docker({"pause", id_});
      if (!paused) return kRunFailed;
      if (paused->code == 0) break;
      if (client_) {
        if (const int code = look_after_client(); code != 0) return code;
      }
      if (started &&
          (contains(paused->err, "is not running") || contains(paused->err, "No such container"))) {
        return ended_early(exit_code_by_inspect());
      }
      if (Clock::now() >= end) {
        return say(kRunRefused, "not armed, for it could not be paused: " + trimmed(paused->err));
      }
      if (!rest(milliseconds(10))) return kRunFailed;
    }
    if (arguments_.detach && client_) {
      if (!client_->wait(nullptr, kCleanUpLimit)) client_->end();
      client_.reset();
    }
    return 0;
  }

  // Of a client that has ended: why there is nothing to pause. With -d it ends when the container
  // has started, which is no failure.
  int look_after_client() {
    const auto ended = client_->wait(nullptr, milliseconds(0), !arguments_.detach);
    if (!ended) return 0;
    const std::string said = client_->err();
    client_.reset();
    if (arguments_.detach) {
      if (ended->code == 0) return 0;
      err_ << said;
      return exit_of_start_error(said);
    }
    if (ended->code == 1 && contains(said, "Error response from daemon")) {
      return exit_of_start_error(said);
    }
    return ended_early(std::to_string(ended->code));
  }

  std::string exit_code_by_inspect() {
    const auto seen =
        docker_now({"inspect", "--type", "container", "--format", "{{.State.ExitCode}}", id_});
    std::string code = seen && seen->code == 0 ? trimmed(seen->out) : "unknown";
    const auto logs = docker_now({"logs", "--tail", "20", id_});
    if (logs && logs->code == 0) err_ << printable_lines(logs->out) << printable_lines(logs->err);
    return code;
  }

  int ended_early(const std::string& code) {
    return say(kRunRefused, "the container ended before it could be armed (its exit code: " + code +
                                "); it ran closed");
  }

  int arm() {
    json body{{"container", id_}};
    if (!arguments_.policy.empty()) body["policy"] = arguments_.policy;
    maybe_released_ = true;  // until an answer says that it is not
    const auto got =
        http::request(context_.socket, "POST", "/v1/arm", body.dump(), context_.timeout);
    if (!got) return say(kRunUnreachable, got.error().to_string());
    const json report = json::parse(got->body, nullptr, false);
    if (!report.is_object()) return say(kRunUnreachable, "the daemon's answer is not JSON");
    if (context_.as_json) err_ << got->body << "\n";
    if (const auto error = report.find("error"); error != report.end()) {
      const json text = error->is_object() ? error->value("text", json()) : json();
      return say(got->status == 400 ? kRunFailed : kRunUnreachable,
                 text.is_string() ? text.get<std::string>() : "the daemon refused the request");
    }
    const auto exit = report.find("exit");
    const int code = exit != report.end() && exit->is_number_integer() ? exit->get<int>() : -1;
    if (code == 0 && report.value("outcome", json()) == "released") return 0;
    std::string text = render_report(report);
    if (const auto id = text.find(id_); id != std::string::npos)
      text.erase(id + 12, id_.size() - 12);
    if (code == 1 || code == 2) maybe_released_ = false;
    const int told = code == 2 ? kRunUndone : kRunRefused;
    return context_.as_json ? told : say(told, text.substr(0, text.find('\n')));
  }

  // -- afterwards -------------------------------------------------------------------------------
  // Signals go to the container by `docker kill`, and the client stands in a group of its own where
  // the terminal's do not reach it: that of 28.5 ends on a signal while it is in `start --attach`.
  // Only with a terminal in raw mode, which makes no signals, it is in our group.
  int stay_attached() {
    for (;;) {
      if (const auto ended = client_->wait(&signals_, std::nullopt, true)) return ended->code;
      while (const auto signal = signals_.next()) {
        (void)docker_now({"kill", "--signal", std::to_string(*signal), id_});
      }
    }
  }

  void remove() {
    if (id_.empty() && !token_.empty()) find_by_label();
    // First, since the removal may fail: what has no caller any more must not have a network.
    const bool closed = !maybe_released_ || close_again();
    bool removed = false;
    if (!id_.empty()) {
      std::string said;
      // On a busy host the engine may miss that a paused runsc has died ("is zombie and can not be
      // killed"), and learns it a moment later.
      for (int tries = 0; tries < 3 && !removed; ++tries) {
        if (tries > 0) ::usleep(700000);
        const auto answer = docker_now({"rm", "--force", "--volumes", id_});
        said = answer ? answer->err : "";
        removed = answer && (answer->code == 0 || contains(said, "No such container") ||
                             contains(said, "is already in progress"));
      }
      if (!removed) {
        say(0, (closed ? "the container is closed, but could not be removed: "
                       : "the container may be released, and could not be removed: ") +
                   trimmed(said) + "; remove it: docker rm -f " + id_);
      }
      remove_cidfile();
    }
    // The terminal is as it was only when the client has gone.
    if (client_ && !client_->wait(nullptr, milliseconds(10000), true)) client_->end();
    if (removed) say(0, "the container was removed");
  }

  // An arm without an answer may still be at it: the daemon takes one after the other.
  bool close_again() {
    const auto got = http::request(context_.socket, "POST", "/v1/disarm",
                                   json{{"container", id_}}.dump(), context_.timeout);
    const json report = got ? json::parse(got->body, nullptr, false) : json();
    return report.is_object() && report.value("exit", json()) == json(0);
  }

  // After an interrupted client the engine may be at it still: looked for more than once.
  void find_by_label() {
    const int looks = interrupted_ != 0 ? 3 : 1;
    for (int look = 0; look < looks && id_.empty(); ++look) {
      if (look > 0) ::usleep(300000);
      const auto found = docker_now(
          {"ps", "--all", "--quiet", "--no-trunc", "--filter", "label=agentgate.run=" + token_});
      const Words ids = found && found->code == 0 ? lines_of(found->out) : Words();
      if (!ids.empty()) id_ = ids.front();
    }
  }

  // It would make the next run with the same file fail.
  void remove_cidfile() const {
    if (arguments_.cidfile.empty()) return;
    std::ifstream stream(arguments_.cidfile);
    const std::string text{std::istreambuf_iterator<char>(stream),
                           std::istreambuf_iterator<char>()};
    std::error_code ignored;
    if (trimmed(text) == id_) std::filesystem::remove(arguments_.cidfile, ignored);
  }

  const RunContext& context_;
  std::ostream& out_;
  std::ostream& err_;
  Signals signals_;
  RunArguments arguments_;
  int interrupted_ = 0;          // the signal
  bool maybe_released_ = false;  // the daemon was asked, and has not said no
  std::string network_;          // chosen by us
  std::string token_, id_;
  std::optional<Child> client_;  // `docker start`
};

}  // namespace

int run_container(const RunContext& context, const Words& words, std::ostream& out,
                  std::ostream& err) {
  return Run(context, out, err)(words);
}

}  // namespace agentgate::cli

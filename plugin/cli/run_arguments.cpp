// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/run_arguments.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string_view>

namespace agentgate::cli {
namespace {

tl::unexpected<Error> usage(std::string text) { return fail("run", std::move(text), EINVAL); }

std::optional<bool> parse_bool(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (text == "true" || text == "1" || text == "t") return true;
  if (text == "false" || text == "0" || text == "f") return false;
  return std::nullopt;
}

class Parser {
 public:
  Parser(const std::vector<std::string>& words, const DockerFlags& flags)
      : words_(words), flags_(flags) {}

  Result<RunArguments> parse() {
    while (at_ < words_.size()) {
      const std::string word = words_[at_];
      if (word.size() < 2 || word[0] != '-') return finish();
      ++at_;
      if (word == "--") {
        out_.create.push_back(word);
        return finish();
      }
      const auto taken = word[1] == '-' ? take_long(word) : take_short(word);
      if (!taken) return tl::unexpected(taken.error());
      if (out_.help) return out_;
    }
    return usage("an IMAGE is missing; see --help");
  }

 private:
  Result<RunArguments> finish() {
    if (at_ == words_.size()) return usage("an IMAGE is missing; see --help");
    out_.create.insert(out_.create.end(), words_.begin() + static_cast<std::ptrdiff_t>(at_),
                       words_.end());
    if (out_.detach && !out_.attach.empty()) return usage("conflicting options: -a and -d");
    // `docker start --attach`, which stands behind the foreground, attaches to both.
    if (!out_.attach.empty() &&
        (out_.attach.count("stdout") == 0 || out_.attach.count("stderr") == 0)) {
      return usage("-a must be given for both stdout and stderr, or not at all");
    }
    return out_;
  }

  Status next_value(const std::string& option, std::string& value) {
    if (at_ == words_.size()) return usage("option " + option + " needs a value");
    value = words_[at_++];
    return {};
  }

  Status take_long(const std::string& word) {
    const std::size_t equal = word.find('=');
    const std::string name = word.substr(2, equal == std::string::npos ? equal : equal - 2);
    const bool joined = equal != std::string::npos;
    std::string value = joined ? word.substr(equal + 1) : "true";
    if (name == "help") {
      out_.help = true;
      return {};
    }
    const bool flag = flags_.without_value.count(name) != 0;
    if (!flag && !joined) {
      if (auto taken = next_value("--" + name, value); !taken) return taken;
    }
    const auto noted = note(name, value);
    if (!noted) return tl::unexpected(noted.error());
    if (*noted) {
      out_.create.push_back(word);
      if (!flag && !joined) out_.create.push_back(value);
    }
    return {};
  }

  // "-dit", "-e A=1", "-eA=1", "-d=false".
  Status take_short(const std::string& word) {
    std::string kept = "-";
    for (std::size_t i = 1; i < word.size(); ++i) {
      const auto known = flags_.short_names.find(word[i]);
      const std::string name =
          known == flags_.short_names.end() ? std::string(1, word[i]) : known->second;
      const bool flag = flags_.without_value.count(name) != 0;
      const bool joined = i + 1 < word.size() && (!flag || word[i + 1] == '=');
      std::string value = "true";
      std::string separate;
      if (joined) {
        value = word.substr(i + (word[i + 1] == '=' ? 2 : 1));
      } else if (!flag) {
        if (auto taken = next_value(std::string("-") + word[i], value); !taken) return taken;
        separate = value;
      }
      const auto noted = note(name, value);
      if (!noted) return tl::unexpected(noted.error());
      if (*noted) kept += joined ? word.substr(i) : std::string(1, word[i]);
      if (joined || !flag) {
        if (kept != "-") out_.create.push_back(kept);
        if (*noted && !joined) out_.create.push_back(separate);
        return {};
      }
    }
    if (kept != "-") out_.create.push_back(kept);
    return {};
  }

  // Whether `docker create` gets the option.
  Result<bool> note(const std::string& name, const std::string& value) {
    const auto boolean = [&](bool& target) -> Status {
      const auto parsed = parse_bool(value);
      if (!parsed) return usage("'" + value + "' is no value for --" + name);
      target = *parsed;
      return {};
    };
    const auto flag = [&](bool& target, bool keep) -> Result<bool> {
      if (auto done = boolean(target); !done) return tl::unexpected(done.error());
      return keep;
    };
    if (name == "policy") {
      if (value.empty()) return usage("--policy needs a name");
      out_.policy = value;
      return false;
    }
    if (name == "wait-ready") {
      out_.wait_ready = parse_duration(value);
      if (!out_.wait_ready) return usage("'" + value + "' is no duration; write 500ms, 30s or 2m");
      return false;
    }
    if (name == "detach") return flag(out_.detach, false);
    if (name == "sig-proxy") {
      bool proxy = true;
      if (auto done = boolean(proxy); !done) return tl::unexpected(done.error());
      if (!proxy) return usage("signals are always handed on to the container; use -d");
      return false;
    }
    if (name == "detach-keys") {
      out_.detach_keys = value;
      return false;
    }
    if (name == "interactive") return flag(out_.interactive, true);
    if (name == "tty") return flag(out_.tty, true);
    if (name == "network" || name == "net") out_.network = true;
    if (name == "cidfile") out_.cidfile = value;
    // The last one given counts, and ours is the first.
    if (name == "label" && (value == "agentgate.run" || value.rfind("agentgate.run=", 0) == 0)) {
      return usage("the label agentgate.run is ours: by it an interrupted run is cleaned up");
    }
    if (name == "attach") {
      std::istringstream parts(value);
      for (std::string part; std::getline(parts, part, ',');) {
        std::transform(part.begin(), part.end(), part.begin(),
                       [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        out_.attach.insert(part);
      }
    }
    return true;
  }

  const std::vector<std::string>& words_;
  const DockerFlags& flags_;
  std::size_t at_ = 0;
  RunArguments out_;
};

}  // namespace

// Lines like "  -d, --detach      Run ..." and "      --name string   Assign ...": one blank before
// the type of a value, more before the description.
DockerFlags parse_docker_help(const std::string& help) {
  DockerFlags flags;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    // The names stand in one column; a description goes on further to the right.
    const std::size_t dashes = line.find("--");
    if (dashes != 6) continue;
    const bool has_short = line[2] == '-' && line.compare(4, 2, ", ") == 0;
    if (!has_short && line.find_first_not_of(' ') != dashes) continue;
    const std::size_t end = std::min(line.find(' ', dashes), line.size());
    const std::string name = line.substr(dashes + 2, end - dashes - 2);
    if (name.empty()) continue;
    const bool value = end + 1 < line.size() && line[end + 1] != ' ';
    if (!value) flags.without_value.insert(name);
    if (has_short) flags.short_names[line[3]] = name;
  }
  // Hidden while experimental; hidden since Docker 29, which ignores it.
  flags.without_value.insert({"use-api-socket", "disable-content-trust"});
  return flags;
}

Result<RunArguments> parse_run(const std::vector<std::string>& words, const DockerFlags& flags) {
  return Parser(words, flags).parse();
}

std::optional<std::chrono::milliseconds> parse_duration(const std::string& text) {
  double total = 0;  // milliseconds
  std::size_t at = 0;
  if (text.empty()) return std::nullopt;
  while (at < text.size()) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789.", at), text.size());
    const std::string number = text.substr(at, digits - at);
    if (number.empty() || number.size() > 9 || number == "." ||
        std::count(number.begin(), number.end(), '.') > 1) {
      return std::nullopt;
    }
    const std::size_t end = std::min(text.find_first_of("0123456789.", digits), text.size());
    const std::string unit = text.substr(digits, end - digits);
    double factor = 0;
    if (unit == "ms") factor = 1;
    if (unit == "s" || (unit.empty() && at == 0)) factor = 1000;
    if (unit == "m") factor = 60'000;
    if (unit == "h") factor = 3'600'000;
    if (factor == 0) return std::nullopt;
    total += std::stod(number) * factor;
    at = end;
  }
  if (total > 24 * 3'600'000.0) return std::nullopt;
  return std::chrono::milliseconds(static_cast<long>(total));
}

}  // namespace agentgate::cli

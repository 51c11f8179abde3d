// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/engine/engine.h"

#include <httplib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>

#include <nlohmann/json.hpp>

namespace agentgate::engine {
namespace {

// The newest version whose fields are known here; an older engine's own is used.
constexpr unsigned kNewestMinor = 51;
constexpr std::size_t kMaxAnswer = 16 << 20;

std::string read_small(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::int64_t> integer(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  std::int64_t value = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string url_part(const std::string& text) {
  static constexpr char hex[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.') {
      out += c;
    } else {
      out += '%';
      out += hex[static_cast<unsigned char>(c) >> 4];
      out += hex[static_cast<unsigned char>(c) & 0xF];
    }
  }
  return out;
}

}  // namespace

Result<ProcessIdentity> process_identity(std::int64_t pid) {
  const std::string operation = "process " + std::to_string(pid);
  const std::string stat = read_small("/proc/" + std::to_string(pid) + "/stat");
  // The command name is in parentheses and may hold anything, parentheses included.
  const auto close = stat.rfind(')');
  if (close == std::string::npos) return fail(operation, "no such process", ESRCH);
  std::istringstream fields(stat.substr(close + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;  // state is field 3
  const auto start = integer(field);
  if (!fields || !start) return fail(operation, "unreadable /proc/PID/stat", EPROTO);
  return ProcessIdentity{pid, static_cast<std::uint64_t>(*start)};
}

struct Engine::Impl {
  Options options;
  std::mutex mutex;
  std::string version;  // "v1.41"; guarded by mutex

  Result<std::string> get(const std::string& path, const std::string& operation,
                          std::string* api_version = nullptr) {
    httplib::Client client(options.socket, 80);
    client.set_address_family(AF_UNIX);
    // Older cpp-httplib sends the socket's path as Host, which the engine refuses.
    client.set_default_headers({{"Host", "localhost"}});
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options.timeout);
    const auto rest = std::chrono::duration_cast<std::chrono::microseconds>(options.timeout - seconds);
    client.set_connection_timeout(seconds.count(), rest.count());
    client.set_read_timeout(seconds.count(), rest.count());
    client.set_write_timeout(seconds.count(), rest.count());
    std::string body;
    errno = 0;
    const auto response = client.Get(path.c_str(), [&](const char* data, std::size_t length) {
      body.append(data, length);
      return body.size() <= kMaxAnswer;
    });
    if (!response) {
      if (body.size() > kMaxAnswer) return fail(operation, "the answer is too large", EPROTO);
      const bool timeout = response.error() == httplib::Error::Read;
      return fail(operation,
                  "the engine does not answer on " + options.socket + " (" +
                      httplib::to_string(response.error()) + "); is it running?",
                  timeout ? ETIMEDOUT : ECONNREFUSED);
    }
    if (api_version != nullptr) *api_version = response->get_header_value("Api-Version");
    if (response->status == 404) return fail(operation, message_of(body), ENOENT);
    if (response->status != 200) {
      return fail(operation, "the engine says " + std::to_string(response->status) + ": " +
                                 message_of(body), EPROTO);
    }
    return body;
  }

  static std::string message_of(const std::string& body) {
    const auto root = nlohmann::json::parse(body, nullptr, false);
    if (root.is_object() && root.contains("message") && root["message"].is_string()) {
      return root["message"].get<std::string>();
    }
    return body.substr(0, 200);
  }

  Result<std::string> negotiate() {
    std::string announced;
    const auto pong = get("/_ping", "ping engine", &announced);
    if (!pong) return tl::unexpected(pong.error());
    // "1.41". No single version suits all engines: 29.0 has a minimum above 20.10's maximum.
    const auto dot = announced.find('.');
    const auto major = integer(announced.substr(0, dot));
    const auto minor = dot == std::string::npos ? std::nullopt : integer(announced.substr(dot + 1));
    if (!major || !minor || *major != 1) {
      return fail("ping engine", "unknown API version '" + announced + "'", EPROTO);
    }
    const std::string chosen =
        "1." + std::to_string(std::min<std::int64_t>(*minor, kNewestMinor));
    const std::lock_guard lock(mutex);
    version = "v" + chosen;
    return chosen;
  }

  Result<std::string> versioned(const std::string& path, const std::string& operation) {
    std::string prefix;
    {
      const std::lock_guard lock(mutex);
      prefix = version;
    }
    if (prefix.empty()) {
      if (const auto chosen = negotiate(); !chosen) return tl::unexpected(chosen.error());
      const std::lock_guard lock(mutex);
      prefix = version;
    }
    return get("/" + prefix + path, operation);
  }

  // The process on the other side of the socket, as the kernel noted it at listen().
  Result<std::int64_t> peer() {
    const std::string operation = "identify engine on " + options.socket;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (options.socket.size() >= sizeof address.sun_path) {
      return fail(operation, "the socket's path is too long", ENAMETOOLONG);
    }
    std::memcpy(address.sun_path, options.socket.c_str(), options.socket.size() + 1);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail_errno(operation);
    ucred credentials{};
    socklen_t length = sizeof credentials;
    Result<std::int64_t> out = 0;
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 ||
        ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0) {
      out = fail_errno(operation, "is the engine running?");
    } else {
      out = credentials.pid;
    }
    ::close(fd);
    return out;
  }
};

Engine::Engine(Options options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
}
Engine::~Engine() = default;

Result<Identity> Engine::identify() {
  auto pid = impl_->peer();
  if (!pid) return tl::unexpected(pid.error());
  const std::string comm = read_small("/proc/" + std::to_string(*pid) + "/comm");
  if (*pid <= 1 || comm.rfind("systemd", 0) == 0) {
    // Socket activation: the service manager listened. The engine wrote down its own pid.
    const auto written = integer(read_small(impl_->options.pid_file));
    if (!written) {
      return fail("identify engine",
                  "the socket is the service manager's and " + impl_->options.pid_file +
                      " does not name the engine's process; give its path with --engine-pid-file",
                  ENOENT);
    }
    pid = *written;
  }
  auto process = process_identity(*pid);
  if (!process) return tl::unexpected(process.error());
  auto version = impl_->negotiate();
  if (!version) return tl::unexpected(version.error());
  return Identity{*process, *version};
}

Result<Container> Engine::inspect(const std::string& reference) {
  auto body = impl_->versioned("/containers/" + url_part(reference) + "/json",
                               "inspect container " + reference);
  if (!body) return tl::unexpected(body.error());
  return container_from_json(*body);
}

Result<Info> Engine::info() {
  auto body = impl_->versioned("/info", "read engine info");
  if (!body) return tl::unexpected(body.error());
  return info_from_json(*body);
}

Result<std::vector<std::string>> Engine::network_endpoints(const std::string& network_id) {
  auto body = impl_->versioned("/networks/" + url_part(network_id), "inspect network " + network_id);
  if (!body) return tl::unexpected(body.error());
  const auto root = nlohmann::json::parse(*body, nullptr, false);
  std::vector<std::string> out;
  if (!root.is_object()) return fail("inspect network", "not a JSON object", EPROTO);
  const auto containers = root.find("Containers");
  if (containers == root.end() || !containers->is_object()) return out;
  for (const auto& [id, value] : containers->items()) {
    if (value.is_object() && value.contains("EndpointID") && value["EndpointID"].is_string()) {
      out.push_back(value["EndpointID"].get<std::string>());
    }
  }
  return out;
}

}  // namespace agentgate::engine

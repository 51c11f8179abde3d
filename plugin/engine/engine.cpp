// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/engine/engine.h"

#include <fcntl.h>
#include <httplib.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "plugin/engine/stream.h"

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

// What a container can be called: its id or name, nothing that would change the request's path.
bool is_reference(const std::string& text) {
  return !text.empty() && text.size() <= 255 && text[0] != '.' && text[0] != '-' &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                  c == '.';
         });
}

// ENOENT is kept for "no such container".
int unreachable_code(int code) { return code == ENOENT ? ECONNREFUSED : code; }

// What the guard wants to hear of, as the engine's filters say it (20.10 and newer). Without
// filters each `docker exec` and health check would be sent as well.
constexpr const char* kEventFilters =
    R"({"type":["container","network"],"event":["start","restart","die","oom","stop","kill","update",)"
    R"("rename","checkpoint","restore","connect","disconnect"]})";

std::string url_encoded(std::string_view text) {
  static constexpr char hex[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      out += c;
    } else {
      out += '%';
      out += hex[static_cast<unsigned char>(c) >> 4];
      out += hex[static_cast<unsigned char>(c) & 0xF];
    }
  }
  return out;
}

// Seconds since the epoch with nine decimals, as the engine's "since" wants it.
std::string timestamp(std::chrono::system_clock::time_point time) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch());
  const std::string fraction = std::to_string(ns.count() % 1000000000);
  return std::to_string(ns.count() / 1000000000) + "." + std::string(9 - fraction.size(), '0') +
         fraction;
}

struct Socket {
  explicit Socket(int value) : fd(value) {}
  ~Socket() {
    if (fd >= 0) ::close(fd);
  }
  Socket(Socket&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  Socket& operator=(Socket&&) = delete;
  int fd;
};

// cpp-httplib's timeouts are for one read: an answer that drips would never end. The watchdog
// stops what runs past its deadline.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  Watchdog() = default;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // What is watched ends at once, and whatever will be.
  void interrupt() {
    const std::lock_guard lock(mutex_);
    interrupted_ = true;
    for (auto& [client, deadline] : watched_) deadline = Clock::now();
    changed_.notify_all();
  }

  class Watch {
   public:
    Watch(Watchdog& dog, httplib::Client& client, Clock::time_point deadline)
        : dog_(dog), client_(client) {
      const std::lock_guard lock(dog_.mutex_);
      dog_.watched_[&client_] = dog_.interrupted_ ? Clock::now() : deadline;
      if (!dog_.thread_.joinable()) dog_.thread_ = std::thread([&dog] { dog.run(); });
      dog_.changed_.notify_all();
    }
    ~Watch() {
      const std::lock_guard lock(dog_.mutex_);
      dog_.watched_.erase(&client_);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Watchdog& dog_;
    httplib::Client& client_;
  };

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (watched_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto next = std::min_element(watched_.begin(), watched_.end(), [](auto& a, auto& b) {
                          return a.second < b.second;
                        })->second;
      changed_.wait_until(lock, next);
      const auto now = Clock::now();
      for (auto& [client, deadline] : watched_) {
        if (deadline > now) continue;
        client->stop();
        // stop() misses a client that is still connecting.
        deadline = now + std::chrono::milliseconds(50);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<httplib::Client*, Clock::time_point> watched_;
  bool stopping_ = false;
  bool interrupted_ = false;
  std::thread thread_;
};

}  // namespace

Result<ProcessIdentity> process_identity(std::int64_t pid, const std::string& proc) {
  const std::string operation = "process " + std::to_string(pid);
  const std::string stat = read_small(proc + "/" + std::to_string(pid) + "/stat");
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
  Watchdog watchdog;
  std::mutex mutex;
  std::string version;  // "v1.41"; guarded by mutex
  std::atomic<bool> interrupted = false;
  const Socket wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};  // readable once interrupted

  static tl::unexpected<Error> cancelled(const std::string& operation) {
    return fail(operation, "the daemon is stopping", ECANCELED);
  }

  struct Answer {
    int status = 0;
    std::string body;
    std::string api_version;
  };

  Result<Answer> ask(const std::string& path, const std::string& operation) {
    const auto deadline = Watchdog::Clock::now() + options.timeout;
    // The library calls every failed connect the same; a person wants to know which it was.
    if (const auto reachable = peer(operation); !reachable) {
      return tl::unexpected(reachable.error());
    }
    httplib::Client client(options.socket, 80);
    client.set_address_family(AF_UNIX);
    // Older cpp-httplib sends the socket's path as Host, which the engine refuses.
    client.set_default_headers({{"Host", "localhost"}});
    client.set_connection_timeout(options.timeout);
    client.set_read_timeout(options.timeout);
    client.set_write_timeout(options.timeout);
    Answer out;
    const Watchdog::Watch watch(watchdog, client, deadline);
    const auto get = [&] {
      return client.Get(path, [&](const char* data, std::size_t length) {
        out.body.append(data, length);
        return out.body.size() <= kMaxAnswer;
      });
    };
    auto response = get();
    // It does not wait either when the listener's queue is full for a moment.
    while (!response && response.error() == httplib::Error::Connection &&
           Watchdog::Clock::now() < deadline && !interrupted) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      response = get();
    }
    if (!response) {
      if (interrupted) return cancelled(operation);
      if (out.body.size() > kMaxAnswer) {
        return fail(operation, "the engine's answer is larger than 16 MiB", EPROTO);
      }
      if (Watchdog::Clock::now() >= deadline) {
        return fail(operation,
                    "the engine gave no whole answer on " + options.socket + " within " +
                        std::to_string(options.timeout.count()) + " ms; is it hanging?",
                    ETIMEDOUT);
      }
      return fail(operation,
                  "no answer of HTTP from " + options.socket + " (" +
                      httplib::to_string(response.error()) + "); is it an engine's socket?",
                  EPROTO);
    }
    out.status = response->status;
    out.api_version = response->get_header_value("Api-Version");
    return out;
  }

  static Result<std::string> body_of(Result<Answer> answer, const std::string& operation) {
    if (!answer) return tl::unexpected(answer.error());
    if (answer->status == 404) return fail(operation, message_of(answer->body), ENOENT);
    if (answer->status != 200) {
      return fail(
          operation,
          "the engine says " + std::to_string(answer->status) + ": " + message_of(answer->body),
          EPROTO);
    }
    return std::move(answer->body);
  }

  static std::string message_of(const std::string& body) {
    const auto root = nlohmann::json::parse(body, nullptr, false);
    if (root.is_object() && root.contains("message") && root["message"].is_string()) {
      return root["message"].get<std::string>();
    }
    return body.substr(0, 200);
  }

  Result<std::string> negotiate() {
    const std::string operation = "ping engine";
    const auto pong = ask("/_ping", operation);
    if (!pong) return tl::unexpected(pong.error());
    if (pong->status != 200) {
      return fail(operation,
                  "the engine says " + std::to_string(pong->status) + ": " + message_of(pong->body),
                  EPROTO);
    }
    // "1.41". No single version suits all engines: 29.0 has a minimum above 20.10's maximum.
    const std::string& announced = pong->api_version;
    const auto dot = announced.find('.');
    const auto major = integer(announced.substr(0, dot));
    const auto minor = dot == std::string::npos ? std::nullopt : integer(announced.substr(dot + 1));
    if (!major || !minor || *major != 1 || *minor < 0) {
      return fail(operation,
                  "unknown API version '" + announced + "'; is " + options.socket +
                      " a Docker engine's socket?",
                  EPROTO);
    }
    const std::string chosen = "1." + std::to_string(std::min<std::int64_t>(*minor, kNewestMinor));
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
    const bool remembered = !prefix.empty();
    for (bool again = false;; again = true) {
      if (prefix.empty() || again) {
        const auto chosen = negotiate();
        if (!chosen) return tl::unexpected(chosen.error());
        prefix = "v" + *chosen;
      }
      std::string whole = "/";
      whole.append(prefix).append(path);
      auto answer = ask(whole, operation);
      // Another engine may answer by now, and refuse the version of the one before.
      if (answer && answer->status == 400 && remembered && !again) continue;
      return body_of(std::move(answer), operation);
    }
  }

  // connect() does not block: the listener's queue may be full for longer than we want to wait.
  Result<Socket> connect(const std::string& operation, Watchdog::Clock::time_point deadline) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (options.socket.empty() || options.socket.size() >= sizeof address.sun_path) {
      return fail(operation, "'" + options.socket + "' cannot be a socket's path", ENAMETOOLONG);
    }
    std::memcpy(address.sun_path, options.socket.c_str(), options.socket.size());
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket.fd < 0) return fail_errno(operation);
    for (;;) {
      if (interrupted) return cancelled(operation);
      if (::connect(socket.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
        return socket;
      }
      const int code = errno;
      if (code == EINTR) continue;
      if (code == EAGAIN && Watchdog::Clock::now() < deadline) {
        pollfd woken{wake.fd, POLLIN, 0};
        ::poll(&woken, 1, 2);
        continue;
      }
      return fail(operation,
                  "the engine cannot be reached on " + options.socket + ": " + errno_name(code) +
                      "; is it running? (--engine-socket)",
                  code == EAGAIN ? ETIMEDOUT : unreachable_code(code));
    }
  }

  // The process on the other side of the socket, as the kernel noted it at listen().
  Result<std::int64_t> peer(const std::string& operation) const {
    const auto socket = connect(operation, Watchdog::Clock::now() + options.timeout);
    if (!socket) return tl::unexpected(socket.error());
    ucred credentials{};
    socklen_t length = sizeof credentials;
    if (::getsockopt(socket->fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0) {
      return fail_errno(operation);
    }
    return credentials.pid;
  }

  // Waits until the socket can be read or written. ETIMEDOUT, ECANCELED.
  // kNever: without an end.
  static constexpr Watchdog::Clock::time_point kNever = Watchdog::Clock::time_point::max();
  Status wait_for(int fd, short what, Watchdog::Clock::time_point deadline,
                  const std::string& operation) const {
    for (;;) {
      if (interrupted) return cancelled(operation);
      int ms = -1;
      if (deadline != kNever) {
        const auto left = deadline - Watchdog::Clock::now();
        if (left.count() <= 0) return fail(operation, "the engine is silent", ETIMEDOUT);
        ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
      }
      std::array<pollfd, 2> both{{{fd, what, 0}, {wake.fd, POLLIN, 0}}};
      if (::poll(both.data(), both.size(), ms) < 0 && errno != EINTR) return fail_errno(operation);
      if (both[0].revents != 0 && both[1].revents == 0) return {};
    }
  }
};

Engine::Engine(Options options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
}
Engine::~Engine() = default;

Result<Identity> Engine::identify() {
  const std::string operation = "identify engine";
  auto pid = impl_->peer(operation);
  if (!pid) return tl::unexpected(pid.error());
  const std::string comm = read_small("/proc/" + std::to_string(*pid) + "/comm");
  if (*pid <= 1 || comm.rfind("systemd", 0) == 0) {
    // Socket activation: the service manager listened. The engine wrote down its own pid.
    const auto written = integer(read_small(impl_->options.pid_file));
    if (!written || *written <= 0) {
      return fail(operation,
                  "the socket is the service manager's and " + impl_->options.pid_file +
                      " does not name the engine's process; give its path with --engine-pid-file",
                  ESRCH);
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
  const std::string operation = "inspect container " + reference;
  if (!is_reference(reference)) {
    return fail(operation, "'" + reference + "' is not a container's name or id", ENOENT);
  }
  auto body = impl_->versioned("/containers/" + reference + "/json", operation);
  if (!body) return tl::unexpected(body.error());
  return container_from_json(*body);
}

Result<Info> Engine::info() {
  auto body = impl_->versioned("/info", "read engine info");
  if (!body) return tl::unexpected(body.error());
  return info_from_json(*body);
}

Result<std::vector<std::string>> Engine::network_endpoints(const std::string& network_id) {
  const std::string operation = "inspect network " + network_id;
  if (!is_reference(network_id)) return fail(operation, "not a network's id", ENOENT);
  auto body = impl_->versioned("/networks/" + network_id, operation);
  if (!body) return tl::unexpected(body.error());
  return endpoints_from_json(*body);
}

Status Engine::events(std::chrono::system_clock::time_point since, EventSink& sink) {
  const std::string operation = "watch engine";
  const auto version = impl_->negotiate();
  if (!version) return tl::unexpected(version.error());
  Watchdog::Clock::time_point deadline = Watchdog::Clock::now() + impl_->options.timeout;
  const auto socket = impl_->connect(operation, deadline);
  if (!socket) return tl::unexpected(socket.error());
  const std::string request = "GET /v" + *version + "/events?since=" + timestamp(since) +
                              "&filters=" + url_encoded(kEventFilters) +
                              " HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (std::size_t sent = 0; sent < request.size();) {
    if (Status ready = impl_->wait_for(socket->fd, POLLOUT, deadline, operation); !ready) {
      return ready;
    }
    const ssize_t length =
        ::send(socket->fd, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (length < 0 && errno != EAGAIN && errno != EINTR) return fail_errno(operation);
    if (length > 0) sent += static_cast<std::size_t>(length);
  }
  EventStream stream;
  bool agreed = false;
  std::array<char, 16384> buffer{};
  for (;;) {
    if (Status ready = impl_->wait_for(socket->fd, POLLIN, deadline, operation); !ready) {
      return ready;
    }
    const ssize_t length = ::recv(socket->fd, buffer.data(), buffer.size(), 0);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (length < 0) return fail_errno(operation);
    if (length == 0) return fail(operation, "the engine closed the stream", ECONNRESET);
    bool progress = stream.whole();
    const auto agree = [&] {
      if (!std::exchange(agreed, true)) sink.connected();
    };
    Status read =
        stream.feed({buffer.data(), static_cast<std::size_t>(length)}, [&](const Event& event) {
          agree();
          progress = true;
          sink.event(event);
        });
    if (stream.agreed()) agree();
    if (!read) return read;
    // Between two events there may be hours, within one there may not.
    if (agreed && stream.whole()) {
      deadline = Impl::kNever;
    } else if (agreed && progress) {
      deadline = Watchdog::Clock::now() + impl_->options.timeout;
    }
  }
}

void Engine::interrupt() {
  impl_->interrupted = true;
  const std::uint64_t one = 1;
  // It can only fail where it is readable already.
  [[maybe_unused]] const ssize_t written = ::write(impl_->wake.fd, &one, sizeof one);
  impl_->watchdog.interrupt();
}

}  // namespace agentgate::engine

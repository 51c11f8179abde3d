// SPDX-License-Identifier: GPL-2.0-or-later

// c-ares 1.34 calls functions deprecated that 1.18 has nothing newer for.
#define CARES_NO_DEPRECATED
#include <ares.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using Clock = std::chrono::steady_clock;

// More at once and forwarders begin to refuse: dnsmasq takes 150 queries at a time.
constexpr std::size_t kNamesAtOnce = 64;

// c-ares has process-wide state that must be made once, before any thread uses it.
int library() {
  static const int status = ares_library_init(ARES_LIB_INIT_ALL);
  return status;
}

// One call of resolve(): its channel and the sockets that c-ares wants watched.
struct Session {
  ares_channel channel = nullptr;
  std::vector<pollfd> sockets;
  std::size_t in_flight = 0;

  Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    // Calls the handlers of what is left with ARES_EDESTRUCTION.
    if (channel != nullptr) ares_destroy(channel);
  }
};

struct Query {
  Session* session;
  ResolvedName* out;
};

void on_socket(void* data, ares_socket_t socket, int readable, int writable) {
  auto& sockets = static_cast<Session*>(data)->sockets;
  const auto at = std::find_if(sockets.begin(), sockets.end(),
                               [&](const pollfd& entry) { return entry.fd == socket; });
  const auto events =
      static_cast<short>((readable != 0 ? POLLIN : 0) | (writable != 0 ? POLLOUT : 0));
  if (events == 0) {
    if (at != sockets.end()) sockets.erase(at);
  } else if (at != sockets.end()) {
    at->events = events;
  } else {
    sockets.push_back({socket, events, 0});
  }
}

std::string explain(int status) {
  switch (status) {
    case ARES_ENOTFOUND:
      return "the name does not exist (NXDOMAIN)";
    case ARES_ENODATA:
      return "the name has no address";
    case ARES_ETIMEOUT:
    case ARES_ECANCELLED:
    case ARES_EDESTRUCTION:
      return "no answer in time";
    case ARES_ECONNREFUSED:  // 1.18 says so too when every server answers REFUSED
      return "no resolver can be reached, or all refuse the question";
    case ARES_ESERVFAIL:
      return "the resolver failed (SERVFAIL)";
    case ARES_EREFUSED:
      return "the resolver refused the question (REFUSED)";
    default:
      return ares_strerror(status);
  }
}

void on_answer(void* data, int status, int /*timeouts*/, ares_addrinfo* info) {
  const Query& query = *static_cast<const Query*>(data);
  --query.session->in_flight;
  ResolvedName& out = *query.out;
  // Whole seconds, so that what was written to the state directory reads back equal.
  const auto now =
      std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  out.resolved_at = now;
  out.error.clear();
  if (status != ARES_SUCCESS || info == nullptr) {
    out.error = explain(status);
    return;
  }
  int ttl = -1;
  const auto shorter = [&](int value) {
    if (value >= 0 && (ttl < 0 || value < ttl)) ttl = value;
  };
  for (const ares_addrinfo_node* node = info->nodes; node != nullptr; node = node->ai_next) {
    std::optional<IpAddress> address;
    if (node->ai_family == AF_INET) {
      const auto* in = reinterpret_cast<const sockaddr_in*>(node->ai_addr);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(&in->sin_addr);
      address = IpAddress::from_bytes({bytes, 4}).value();
    } else if (node->ai_family == AF_INET6) {
      const auto* in = reinterpret_cast<const sockaddr_in6*>(node->ai_addr);
      address = IpAddress::from_bytes({in->sin6_addr.s6_addr, 16}).value();
    }
    // An IPv4 address in an AAAA record would pass the rules for IPv4.
    if (!address || (address->is_v6() && address->v6().is_v4_mapped())) continue;
    shorter(node->ai_ttl);
    out.addresses.push_back({*address, now});
  }
  for (const ares_addrinfo_cname* name = info->cnames; name != nullptr; name = name->next) {
    shorter(name->ttl);
  }
  ares_freeaddrinfo(info);
  out.ttl = std::chrono::seconds(std::max(ttl, 0));
  std::sort(out.addresses.begin(), out.addresses.end(),
            [](const auto& a, const auto& b) { return a.address < b.address; });
  out.addresses.erase(std::unique(out.addresses.begin(), out.addresses.end()), out.addresses.end());
  if (out.addresses.empty()) out.error = explain(ARES_ENODATA);
}

// Nothing: no channel. The text of the error otherwise.
std::string open(Session& session, const Resolver::Options& options) {
  if (const int status = library(); status != ARES_SUCCESS) return ares_strerror(status);
  ares_options settings{};
  char lookups[] = "b";  // DNS only: /etc/hosts of this host is not the world's
  settings.lookups = lookups;
  // So that a second server is still asked in time when the first one is dead.
  settings.timeout =
      static_cast<int>(std::clamp<std::int64_t>(options.timeout.count() / 4, 50, 2000));
  settings.tries = 3;
  settings.flags = ARES_FLAG_NOSEARCH | ARES_FLAG_NOALIASES;
  settings.sock_state_cb = on_socket;
  settings.sock_state_cb_data = &session;
  int status = ares_init_options(&session.channel, &settings,
                                 ARES_OPT_LOOKUPS | ARES_OPT_TIMEOUTMS | ARES_OPT_TRIES |
                                     ARES_OPT_FLAGS | ARES_OPT_SOCK_STATE_CB);
  if (status != ARES_SUCCESS) return ares_strerror(status);
  if (options.servers.empty()) return "";
  std::string list;
  for (const auto& server : options.servers) list += (list.empty() ? "" : ",") + server;
  status = ares_set_servers_ports_csv(session.channel, list.c_str());
  if (status != ARES_SUCCESS) return "resolver list '" + list + "': " + ares_strerror(status);
  return "";
}

void process(Session& session, Clock::duration left) {
  timeval most{};
  most.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(left).count();
  most.tv_usec = std::chrono::duration_cast<std::chrono::microseconds>(left).count() % 1'000'000;
  timeval storage{};
  const timeval* wait = ares_timeout(session.channel, &most, &storage);
  // At least one: c-ares 1.18 says 0 for some time before it takes a timeout as due.
  const auto milliseconds =
      static_cast<int>(std::max(1L, wait->tv_sec * 1000 + (wait->tv_usec + 999) / 1000));
  std::vector<pollfd> ready = session.sockets;  // the handlers change the list
  const int count = ::poll(ready.data(), ready.size(), milliseconds);
  if (count <= 0) {
    ares_process_fd(session.channel, ARES_SOCKET_BAD, ARES_SOCKET_BAD);
    return;
  }
  for (const pollfd& entry : ready) {
    if (entry.revents == 0) continue;
    const bool broken = (entry.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    ares_process_fd(session.channel,
                    broken || (entry.revents & POLLIN) != 0 ? entry.fd : ARES_SOCKET_BAD,
                    (entry.revents & POLLOUT) != 0 ? entry.fd : ARES_SOCKET_BAD);
  }
}

}  // namespace

struct Resolver::Impl {
  Options options;
};

Resolver::Resolver(Options options) : impl_(std::make_unique<Impl>(Impl{std::move(options)})) {}
Resolver::~Resolver() = default;

Resolution Resolver::resolve(const std::vector<std::string>& names) {
  const auto deadline = Clock::now() + impl_->options.timeout;
  const auto now =
      std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
  Resolution out;
  for (const std::string& name : names) {
    out.names[name].resolved_at = now;
    out.names[name].error = explain(ARES_ETIMEOUT);  // until it is answered
  }
  // A channel for each call, so that a changed resolv.conf is seen.
  std::vector<Query> queries;  // outlives the session, whose end calls the handlers
  queries.reserve(out.names.size());
  Session session;
  if (const std::string error = open(session, impl_->options); !error.empty()) {
    for (auto& [name, resolved] : out.names) resolved.error = error;
    return out;
  }
  ares_addrinfo_hints hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_flags = ARES_AI_NOSORT;
  auto following = out.names.begin();
  for (;;) {
    while (following != out.names.end() && session.in_flight < kNamesAtOnce) {
      queries.push_back({&session, &following->second});  // std::map: stays where it is
      ++session.in_flight;
      ares_getaddrinfo(session.channel, following->first.c_str(), nullptr, &hints, on_answer,
                       &queries.back());
      ++following;
    }
    if (session.in_flight == 0 && following == out.names.end()) break;
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) break;
    process(session, left);
  }
  return out;
}

}  // namespace agentgate::policy

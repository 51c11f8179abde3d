// SPDX-License-Identifier: GPL-2.0-or-later
#include <ares.h>
#include <arpa/inet.h>
#include <netdb.h>
#include <sys/select.h>
#include <sys/socket.h>

#include <algorithm>
#include <mutex>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

using Clock = std::chrono::steady_clock;

// c-ares has process-wide state that must be made once, before any thread uses it.
int library() {
  static const int status = ares_library_init(ARES_LIB_INIT_ALL);
  return status;
}

struct Query {
  std::string name;
  ResolvedName* out;
  bool answered = false;
};

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
    case ARES_ECONNREFUSED:
      return "no resolver can be reached";
    case ARES_ESERVFAIL:
      return "the resolver failed (SERVFAIL)";
    default:
      return ares_strerror(status);
  }
}

void on_answer(void* data, int status, int /*timeouts*/, ares_addrinfo* info) {
  auto* query = static_cast<Query*>(data);
  query->answered = true;
  ResolvedName& out = *query->out;
  if (status != ARES_SUCCESS || info == nullptr) {
    out.error = explain(status);
    return;
  }
  const auto now = std::chrono::system_clock::now();
  out.resolved_at = now;
  int ttl = -1;
  const auto shorter = [&](int value) {
    if (value >= 0 && (ttl < 0 || value < ttl)) ttl = value;
  };
  for (const ares_addrinfo_node* node = info->nodes; node != nullptr; node = node->ai_next) {
    Result<IpAddress> address = fail("answer", "unknown family");
    if (node->ai_family == AF_INET) {
      const auto* in = reinterpret_cast<const sockaddr_in*>(node->ai_addr);
      address = IpAddress::from_bytes({reinterpret_cast<const std::uint8_t*>(&in->sin_addr), 4});
    } else if (node->ai_family == AF_INET6) {
      const auto* in = reinterpret_cast<const sockaddr_in6*>(node->ai_addr);
      address = IpAddress::from_bytes({in->sin6_addr.s6_addr, 16});
    }
    if (!address) continue;
    shorter(node->ai_ttl);
    const bool known = std::any_of(out.addresses.begin(), out.addresses.end(), [&](const auto& a) {
      return a.address == *address;
    });
    if (!known) out.addresses.push_back({*address, now});
  }
  for (const ares_addrinfo_cname* name = info->cnames; name != nullptr; name = name->next) {
    shorter(name->ttl);
  }
  out.ttl = std::chrono::seconds(std::max(ttl, 0));
  std::sort(out.addresses.begin(), out.addresses.end(),
            [](const auto& a, const auto& b) { return a.address < b.address; });
  if (out.addresses.empty()) out.error = explain(ARES_ENODATA);
  ares_freeaddrinfo(info);
}

}  // namespace

struct Resolver::Impl {
  Options options;
};

Resolver::Resolver(Options options) : impl_(std::make_unique<Impl>(Impl{std::move(options)})) {}
Resolver::~Resolver() = default;

Resolution Resolver::resolve(const std::vector<std::string>& names) {
  Resolution out;
  std::vector<std::unique_ptr<Query>> queries;
  for (const std::string& name : names) {
    if (out.names.count(name) != 0) continue;
    auto query = std::make_unique<Query>();
    query->name = name;
    query->out = &out.names[name];  // std::map: stays where it is
    queries.push_back(std::move(query));
  }
  const auto all_fail = [&](const std::string& why) {
    for (auto& [name, resolved] : out.names) resolved.error = why;
    return out;
  };
  if (library() != ARES_SUCCESS) return all_fail("c-ares does not start");

  ares_options settings{};
  char lookups[] = "b";  // DNS only: /etc/hosts of this host is not the world's
  settings.lookups = lookups;
  settings.timeout = static_cast<int>(std::max<std::int64_t>(impl_->options.timeout.count() / 3, 50));
  settings.tries = 2;
  settings.flags = ARES_FLAG_NOSEARCH | ARES_FLAG_NOALIASES;
  ares_channel channel = nullptr;
  // A channel for each call, so that a changed resolv.conf is seen.
  int status = ares_init_options(&channel, &settings,
                                 ARES_OPT_LOOKUPS | ARES_OPT_TIMEOUTMS | ARES_OPT_TRIES |
                                     ARES_OPT_FLAGS);
  if (status != ARES_SUCCESS) return all_fail(explain(status));
  if (!impl_->options.servers.empty()) {
    std::string list;
    for (const auto& server : impl_->options.servers) list += (list.empty() ? "" : ",") + server;
    status = ares_set_servers_ports_csv(channel, list.c_str());
    if (status != ARES_SUCCESS) {
      ares_destroy(channel);
      return all_fail("resolver list '" + list + "': " + ares_strerror(status));
    }
  }
  ares_addrinfo_hints hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_flags = ARES_AI_NOSORT;
  for (const auto& query : queries) {
    ares_getaddrinfo(channel, query->name.c_str(), nullptr, &hints, on_answer, query.get());
  }
  const auto deadline = Clock::now() + impl_->options.timeout;
  const auto pending = [&] {
    return std::any_of(queries.begin(), queries.end(), [](const auto& q) { return !q->answered; });
  };
  while (pending()) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
    if (left.count() <= 0) break;
    fd_set readers;
    fd_set writers;
    FD_ZERO(&readers);
    FD_ZERO(&writers);
    const int count = ares_fds(channel, &readers, &writers);
    timeval most{left.count() / 1000000, left.count() % 1000000};
    timeval storage{};
    timeval* wait = ares_timeout(channel, &most, &storage);
    const int ready = ::select(count, &readers, &writers, nullptr, wait);
    if (ready < 0 && errno != EINTR) break;
    ares_process(channel, &readers, &writers);
  }
  ares_destroy(channel);  // answers what is left with ARES_EDESTRUCTION
  return out;
}

}  // namespace agentgate::policy

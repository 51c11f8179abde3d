// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/http/client.h"

#include <httplib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

namespace agentgate::http {
namespace {

// The library reports every failed connect alike; a person wants to know which.
Status can_connect(const std::string& operation, const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return fail(operation, "not a path that a socket can have", EINVAL);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return fail_errno(operation);
  Status out;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
      errno != EAGAIN) {
    out = fail_errno(operation);
  }
  ::close(fd);
  return out;
}

}  // namespace

Result<Response> request(const std::filesystem::path& socket, const std::string& method,
                         const std::string& path, const std::string& body,
                         std::chrono::milliseconds timeout) {
  const std::string operation = "ask " + socket.string();
  if (const Status reachable = can_connect(operation, socket.native()); !reachable) {
    return tl::unexpected(reachable.error());
  }
  const auto started = std::chrono::steady_clock::now();
  try {
    httplib::Client client(socket.native());
    client.set_address_family(AF_UNIX);
    // 0.11.4 and 0.18.7 would send the socket's path as Host.
    client.set_default_headers({{"Host", "localhost"}});
    client.set_connection_timeout(timeout);
    client.set_read_timeout(timeout);
    client.set_write_timeout(timeout);
    const httplib::Result got =
        method == "GET" ? client.Get(path) : client.Post(path, body, "application/json");
    if (!got) {
      const bool late = std::chrono::steady_clock::now() - started >= timeout;
      return fail(operation, late ? "no answer within the timeout" : "the connection was lost",
                  late ? ETIMEDOUT : EPROTO);
    }
    return Response{got->status, got->body, got->get_header_value("Content-Type")};
  } catch (const std::exception& error) {
    return fail(operation, error.what(), EPROTO);
  }
}

}  // namespace agentgate::http

// SPDX-License-Identifier: GPL-2.0-or-later
//
// Server: HTTP over a Unix socket, for the driver's API and the control API.
//
// It owns the socket file, the connections and their threads, and every bound that keeps a client
// from taking more than its share. It knows nothing of JSON, Docker or what a path means: one
// handler gets every request that is well-formed, and answers 404 and 405 itself.
//
// One connection carries one request. Bounds: Options::connections at once (further ones wait in
// the kernel's backlog), one read timeout from accept to the end of the request (not per byte: a
// client that sends a byte now and then is cut off as well), body and header sizes. A body in
// chunks or with a content encoding is refused, since its size cannot be judged beforehand.
//
// Threading: the handler runs on many threads at once. stop() and the destructor let handlers that
// run finish and answer, drop everything else, and remove the socket file if it is still ours.
// Errors: start() says what the system said; EADDRINUSE: somebody answers on the socket already;
// EEXIST: what is there is not a socket. A handler that throws is answered with 500.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "netdriver/error.h"

namespace agentgate::http {

// The process at the other end, from the kernel (SO_PEERCRED).
struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

struct Request {
  std::string method;  // as sent, e.g. "POST"
  std::string path;    // without the query
  std::string body;
  Peer peer;
};

struct Response {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
};

using Handler = std::function<Response(const Request&)>;

struct Options {
  std::filesystem::path socket;
  mode_t mode = 0600;
  std::optional<uid_t> owner;  // of the socket file; the process's when not given
  std::optional<gid_t> group;
  std::size_t connections = 128;
  std::size_t body_limit = 1U << 20U;     // bytes
  std::size_t header_limit = 64U << 10U;  // bytes, request line included
  std::chrono::milliseconds read_timeout{5000};
  std::chrono::milliseconds write_timeout{5000};
  // The body of answers that no handler made (bad request, too large, too slow, 500).
  std::function<std::string(int status, const std::string& text)> error_body;
};

class Server {
 public:
  // Returns when clients can connect. The directory of the socket is made if it is missing.
  static Result<std::unique_ptr<Server>> start(Options options, Handler handler);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void stop();

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::http

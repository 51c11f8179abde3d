// SPDX-License-Identifier: GPL-2.0-or-later
//
// Control: the companion API, /v1/... on its own socket, answered from arm::Service
// (docs/api.md, docs/openapi.json).
//
// It owns the routes and knows nothing of what an operation does. What the pipeline finds is a
// result, not an HTTP error: 200 with a report whose "exit" is the command line's exit code. 400
// says which field of the request is wrong; 503 is /v1/health when it is not well.
//
// Threading: handle() may be called from any thread and takes as long as the operation does.
// Logging: every operation with who asked (pid and uid of the peer) and its outcome.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plugin/arm/service.h"
#include "plugin/control/codec.h"
#include "plugin/http/server.h"

namespace agentgate::control {

class Control {
 public:
  explicit Control(arm::Service& service) : service_(service) {}  // outlives the control

  [[nodiscard]] http::Response handle(const http::Request& request);

  // Method and path of every route.
  [[nodiscard]] static std::vector<std::pair<std::string, std::string>> routes();

 private:
  struct Route;
  static const std::vector<Route>& table();

  http::Response arm(const http::Request& request);
  http::Response precheck(const http::Request& request);
  http::Response disarm(const http::Request& request);
  http::Response check(const http::Request& request);
  http::Response refresh(const http::Request& request);
  http::Response status(const http::Request& request);
  http::Response health(const http::Request& request);
  http::Response metrics(const http::Request& request);
  http::Response doctor(const http::Request& request);
  http::Response version(const http::Request& request);
  [[nodiscard]] Totals totals() const;
  http::Response report_on(const http::Request& request, const arm::Report& report);

  arm::Service& service_;
  std::atomic<std::uint64_t> armed_{0}, disarmed_{0}, refused_{0}, undone_{0}, inconsistent_{0};
};

}  // namespace agentgate::control

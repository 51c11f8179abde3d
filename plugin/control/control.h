// SPDX-License-Identifier: GPL-2.0-or-later
//
// The control API: /v1/…, JSON over its own Unix socket (docs/api.md, docs/openapi.json).
//
// It parses requests, asks arm::Service, and encodes what that answers; it decides nothing.
// Threading: handle() may be called from any thread. A pipeline outcome is an answer with status
// 200, whatever it is; 400 is a request that makes no sense, and names the field and the mend.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plugin/arm/service.h"
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
  http::Response arm(const std::string& body);
  http::Response disarm(const std::string& body);
  http::Response check(const std::string& body);
  http::Response refresh(const std::string& body);
  http::Response status(const std::string& body);
  http::Response version(const std::string& body);
  http::Response health(const std::string& body);
  http::Response doctor(const std::string& body);
  void count(const arm::Report& report);

  arm::Service& service_;
  std::atomic<std::uint64_t> released_{0}, refused_{0}, undone_{0}, closed_{0}, inconsistent_{0};
};

}  // namespace agentgate::control

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/control/control.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "plugin/control/metrics.h"

namespace agentgate::control {
namespace {

http::Response refuse(int status, const BadRequest& error) {
  return {status, encode_error(error), "application/json"};
}

http::Response answer(std::string body) { return {200, std::move(body), "application/json"}; }

}  // namespace

struct Control::Route {
  const char* method;
  const char* path;
  http::Response (Control::*run)(const http::Request& request);
};

const std::vector<Control::Route>& Control::table() {
  static const std::vector<Route> all{
      {"POST", "/v1/arm", &Control::arm},         {"POST", "/v1/precheck", &Control::precheck},
      {"POST", "/v1/disarm", &Control::disarm},   {"POST", "/v1/check", &Control::check},
      {"POST", "/v1/refresh", &Control::refresh}, {"GET", "/v1/status", &Control::status},
      {"GET", "/v1/health", &Control::health},    {"GET", "/v1/metrics", &Control::metrics},
      {"GET", "/v1/doctor", &Control::doctor},    {"GET", "/v1/version", &Control::version},
  };
  return all;
}

std::vector<std::pair<std::string, std::string>> Control::routes() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Route& route : table()) out.emplace_back(route.method, route.path);
  return out;
}

http::Response Control::handle(const http::Request& request) {
  const auto& all = table();
  const auto route = std::find_if(all.begin(), all.end(),
                                  [&](const Route& entry) { return request.path == entry.path; });
  if (route == all.end()) {
    return refuse(404, {"path", "there is no such path; docs/api.md lists what there is"});
  }
  if (request.method != route->method) {
    return refuse(405, {"method", std::string("send ") + route->method});
  }
  return (this->*route->run)(request);
}

http::Response Control::report_on(const http::Request& request, const arm::Report& report) {
  switch (report.outcome) {
    case arm::Outcome::released:
      if (report.operation == "arm") ++armed_;
      break;
    case arm::Outcome::closed:
      if (report.operation == "disarm") ++disarmed_;
      break;
    case arm::Outcome::refused:
      ++refused_;
      break;
    case arm::Outcome::undone:
      ++undone_;
      break;
    case arm::Outcome::inconsistent:
      ++inconsistent_;
      break;
    case arm::Outcome::repaired:  // of the audit file; nobody asks for one
      break;
  }
  spdlog::info("{} {}: {} {} (asked by pid {}, uid {})", report.operation, report.container,
               arm::to_string(report.outcome), report.reason, request.peer.pid, request.peer.uid);
  return answer(arm::to_json(report));
}

http::Response Control::arm(const http::Request& request) {
  const auto wanted = decode_arm(request.body);
  if (!wanted) return refuse(400, wanted.error());
  return report_on(request, service_.arm(*wanted));
}

http::Response Control::precheck(const http::Request& request) {
  const auto wanted = decode_precheck(request.body);
  if (!wanted) return refuse(400, wanted.error());
  return report_on(request, service_.precheck(*wanted));
}

http::Response Control::disarm(const http::Request& request) {
  const auto container = decode_container(request.body);
  if (!container) return refuse(400, container.error());
  return report_on(request, service_.disarm(*container));
}

http::Response Control::check(const http::Request& request) {
  const auto container = decode_container(request.body);
  if (!container) return refuse(400, container.error());
  return report_on(request, service_.check(*container));
}

http::Response Control::refresh(const http::Request& request) {
  const auto wanted = decode_refresh(request.body);
  if (!wanted) return refuse(400, wanted.error());
  const auto refreshed = service_.refresh(wanted->policy);
  for (const auto& one : refreshed) {
    spdlog::info("refresh {}: {} (asked by pid {}, uid {})", one.policy,
                 one.ok ? "done" : one.error, request.peer.pid, request.peer.uid);
  }
  return answer(encode(refreshed));
}

http::Response Control::status(const http::Request& /*request*/) {
  return answer(encode_status(service_.status(), service_.engine_guard()));
}

http::Response Control::health(const http::Request& /*request*/) {
  const host::Snapshot snapshot = service_.status();
  return {is_healthy(snapshot) ? 200 : 503,
          encode_health(snapshot, totals(), service_.engine_guard()), "application/json"};
}

http::Response Control::metrics(const http::Request& /*request*/) {
  return {200, encode_metrics(service_.status(), totals(), service_.engine_guard()), kMetricsType};
}

Totals Control::totals() const { return {armed_, disarmed_, refused_, undone_, inconsistent_}; }

http::Response Control::doctor(const http::Request& /*request*/) {
  return answer(encode(service_.doctor()));
}

http::Response Control::version(const http::Request& /*request*/) {
  return answer(encode_version());
}

}  // namespace agentgate::control

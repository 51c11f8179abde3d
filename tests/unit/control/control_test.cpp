// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/control/control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "plugin/control/codec.h"

namespace agentgate::control {
namespace {

using nlohmann::json;

class FakeService : public arm::Service {
 public:
  arm::Report report;
  host::Snapshot snapshot;
  arm::EngineGuardStatus guarded;
  std::vector<arm::Refreshed> refreshed;
  std::vector<arm::Finding> findings;
  std::vector<std::string> calls;

  arm::Report arm(const arm::ArmRequest& request) override {
    calls.push_back("arm " + request.container + " " + request.policy.value_or("-"));
    return made("arm", request.container);
  }
  arm::Report precheck(const arm::ArmRequest& request) override {
    calls.push_back("precheck " + request.container + " " + request.policy.value_or("-") + " " +
                    request.network.value_or("-").substr(0, 4));
    return made("precheck", request.container);
  }
  arm::Report disarm(const std::string& container) override {
    calls.push_back("disarm " + container);
    return made("disarm", container);
  }
  arm::Report check(const std::string& container) override {
    calls.push_back("check " + container);
    return made("check", container);
  }
  std::vector<arm::Refreshed> refresh(const std::optional<std::string>& policy) override {
    calls.push_back("refresh " + policy.value_or("-"));
    return refreshed;
  }
  host::Snapshot status() override { return snapshot; }
  arm::EngineGuardStatus engine_guard() override { return guarded; }
  std::vector<arm::Finding> doctor() override { return findings; }

 private:
  [[nodiscard]] arm::Report made(const char* operation, const std::string& container) const {
    arm::Report out = report;
    out.operation = operation;
    out.container = container;
    return out;
  }
};

json openapi() {
  std::ifstream stream(AGENTGATE_OPENAPI);
  return json::parse(stream);
}

// Whether `value` is what a schema of ours says: type, required, enum, no key that is not listed.
std::string mismatch(const json& api, json schema, const json& value, const std::string& where) {
  if (schema.contains("$ref")) {
    schema = api.at(json::json_pointer(schema["$ref"].get<std::string>().substr(1)));
  }
  if (value.is_null() && schema.value("nullable", false)) return {};
  const std::string type = schema.at("type");
  const bool fits =
      (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
      (type == "string" && value.is_string()) || (type == "boolean" && value.is_boolean()) ||
      (type == "integer" && value.is_number_integer()) || (type == "number" && value.is_number());
  if (!fits) return where + " is not " + type;
  if (schema.contains("enum") &&
      std::count(schema["enum"].begin(), schema["enum"].end(), value) == 0) {
    return where + " is none of " + schema["enum"].dump();
  }
  if (type == "array") {
    for (const json& entry : value) {
      if (auto wrong = mismatch(api, schema["items"], entry, where + "[]"); !wrong.empty())
        return wrong;
    }
  }
  if (type == "object") {
    for (const json& key : schema.value("required", json::array())) {
      if (!value.contains(key.get<std::string>())) return where + " lacks " + key.dump();
    }
    for (const auto& [key, entry] : value.items()) {
      if (!schema["properties"].contains(key)) return where + "." + key + " is not documented";
      if (auto wrong = mismatch(api, schema["properties"][key], entry, where + "." + key);
          !wrong.empty()) {
        return wrong;
      }
    }
  }
  return {};
}

class ControlTest : public testing::Test {
 protected:
  http::Response call(const std::string& method, const std::string& path,
                      const std::string& body = {}) {
    return control_.handle({method, path, body, {1, 0, 0}});
  }
  json expect_200(const std::string& method, const std::string& path,
                  const std::string& body = {}) {
    const http::Response answer = call(method, path, body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    return json::parse(answer.body);
  }
  // The answer is what docs/openapi.json says of that operation and status.
  void expect_documented(const std::string& method, const std::string& path,
                         const std::string& body, int status) {
    static const json api = openapi();
    const http::Response answer = call(method, path, body);
    ASSERT_EQ(answer.status, status) << answer.body;
    std::string lower = method;
    std::transform(lower.begin(), lower.end(), lower.begin(), ::tolower);
    json response = api["paths"][path][lower]["responses"][std::to_string(status)];
    if (response.contains("$ref")) {
      response = api.at(json::json_pointer(response["$ref"].get<std::string>().substr(1)));
    }
    EXPECT_EQ(mismatch(api, response["content"]["application/json"]["schema"],
                       json::parse(answer.body), path),
              "");
  }
  std::string field_of_400(const std::string& path, const std::string& body) {
    const http::Response answer = call("POST", path, body);
    EXPECT_EQ(answer.status, 400) << answer.body;
    const json error = json::parse(answer.body)["error"];
    EXPECT_FALSE(error.value("text", "").empty());
    return error.value("field", "");
  }

  FakeService service_;
  Control control_{service_};
};

TEST_F(ControlTest, TheDocumentHasEveryRouteAndNoOther) {
  std::set<std::pair<std::string, std::string>> documented;
  const json api = openapi();
  for (const auto& [path, methods] : api["paths"].items()) {
    for (const auto& [method, operation] : methods.items()) {
      std::string upper = method;
      std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
      documented.emplace(upper, path);
    }
  }
  const auto routes = Control::routes();
  const std::set<std::pair<std::string, std::string>> known(routes.begin(), routes.end());
  EXPECT_EQ(known.size(), routes.size());
  EXPECT_EQ(known, documented);
}

TEST_F(ControlTest, PassesOperationsOn) {
  expect_200("POST", "/v1/arm", R"({"container":"a1"})");
  expect_200("POST", "/v1/arm", R"({"container":"a1","policy":"web"})");
  expect_200("POST", "/v1/disarm", R"({"container":"a.b_c-1"})");
  expect_200("POST", "/v1/check", R"({"container":"0123456789ab"})");
  expect_200("POST", "/v1/refresh", "");
  expect_200("POST", "/v1/refresh", "{}");
  expect_200("POST", "/v1/refresh", R"({"policy":"web"})");
  EXPECT_EQ(service_.calls, (std::vector<std::string>{"arm a1 -", "arm a1 web", "disarm a.b_c-1",
                                                      "check 0123456789ab", "refresh -",
                                                      "refresh -", "refresh web"}));
}

TEST_F(ControlTest, OutcomesAreResultsWithAnExitCode) {
  const std::pair<arm::Outcome, int> cases[] = {{arm::Outcome::released, 0},
                                                {arm::Outcome::refused, 1},
                                                {arm::Outcome::undone, 2},
                                                {arm::Outcome::inconsistent, 3}};
  for (const auto& [outcome, exit] : cases) {
    service_.report.outcome = outcome;
    EXPECT_EQ(expect_200("POST", "/v1/arm", R"({"container":"a1"})")["exit"], exit);
  }
}

TEST_F(ControlTest, BadRequestsNameTheField) {
  for (const char* path : {"/v1/arm", "/v1/disarm", "/v1/check"}) {
    EXPECT_EQ(field_of_400(path, ""), "body");
    EXPECT_EQ(field_of_400(path, "[]"), "body");
    EXPECT_EQ(field_of_400(path, "{"), "body");
    EXPECT_EQ(field_of_400(path, "{}"), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":1})"), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":null})"), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":""})"), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":"../x"})"), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":"a?b"})"), "container");
    EXPECT_EQ(field_of_400(path, json{{"container", std::string(256, 'a')}}.dump()), "container");
    EXPECT_EQ(field_of_400(path, R"({"container":"a1","polcy":"x"})"), "'polcy'");
    EXPECT_EQ(field_of_400(path, R"({"container":"a1","container":"a2"})"), "'container'");
  }
  EXPECT_EQ(field_of_400("/v1/arm", R"({"container":"a1","policy":"No Name"})"), "policy");
  EXPECT_EQ(field_of_400("/v1/arm", R"({"container":"a1","policy":{"policy":"x"}})"), "policy");
  EXPECT_EQ(field_of_400("/v1/disarm", R"({"container":"a1","policy":"web"})"), "'policy'");
  EXPECT_EQ(field_of_400("/v1/refresh", R"({"policy":"../x"})"), "policy");
  EXPECT_EQ(field_of_400("/v1/refresh", "[]"), "body");
  EXPECT_TRUE(service_.calls.empty());
}

TEST_F(ControlTest, UnknownPathsAndMethods) {
  EXPECT_EQ(call("GET", "/v1/nothing").status, 404);
  EXPECT_EQ(call("GET", "/").status, 404);
  EXPECT_EQ(call("GET", "/v1/arm").status, 405);
  EXPECT_EQ(call("POST", "/v1/status", "{}").status, 405);
  EXPECT_EQ(call("DELETE", "/v1/health").status, 405);
  EXPECT_EQ(json::parse(call("GET", "/v1/arm").body)["error"]["field"], "method");
}

TEST_F(ControlTest, HealthIsAContract) {
  json health = json::parse(call("GET", "/v1/health").body);
  EXPECT_EQ(call("GET", "/v1/health").status, 503);
  EXPECT_EQ(health["healthy"], false);
  EXPECT_EQ(health["reasons"].size(), 1U);
  service_.snapshot.failure = "no nf_tables";
  EXPECT_EQ(json::parse(call("GET", "/v1/health").body)["reasons"][0], "no nf_tables");
  service_.snapshot.failure.clear();
  service_.snapshot.ready = true;
  service_.snapshot.incidents = {"one"};
  EndpointRecord endpoint;
  service_.snapshot.endpoints = {endpoint, endpoint};
  service_.snapshot.endpoints[1].release = Release{};
  health = expect_200("GET", "/v1/health");
  service_.report.outcome = arm::Outcome::refused;
  call("POST", "/v1/arm", R"({"container":"a1"})");
  service_.report.outcome = arm::Outcome::released;
  call("POST", "/v1/arm", R"({"container":"a1"})");
  call("POST", "/v1/check", R"({"container":"a1"})");  // counts nothing
  service_.report.outcome = arm::Outcome::closed;
  call("POST", "/v1/disarm", R"({"container":"a1"})");
  health = expect_200("GET", "/v1/health");
  EXPECT_EQ(health, json::parse(R"({"version":1,"healthy":true,"reasons":[],
      "counters":{"networks":0,"endpoints":2,"endpoints_released":1,"incidents":1,
                  "repairs":0,"repairs_failed":0,
                  "armed":1,"disarmed":1,"refused":1,"undone":0,"inconsistent":0,
                  "engine_guard_losses":0,"engine_guard_closed":0}})"));
}

TEST_F(ControlTest, MetricsSayWhatHealthSays) {
  service_.report.outcome = arm::Outcome::refused;
  call("POST", "/v1/arm", R"({"container":"a1"})");
  call("POST", "/v1/arm", R"({"container":"a1"})");
  service_.snapshot.ready = true;
  service_.snapshot.endpoints.resize(2);
  service_.snapshot.endpoints[0].release.emplace();
  service_.snapshot.guard.repairs = 3;
  service_.guarded.connected = true;
  service_.guarded.closed = 4;
  const http::Response answer = call("GET", "/v1/metrics");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.content_type, "text/plain; version=0.0.4; charset=utf-8");
  for (const char* line :
       {"agentgate_healthy 1\n", "# TYPE agentgate_guard_repairs_total counter\n",
        "agentgate_guard_repairs_total 3\n", "agentgate_operations_total{outcome=\"refused\"} 2\n",
        "agentgate_engine_guard_connected 1\n", "agentgate_engine_guard_closed_total 4\n",
        "agentgate_ports{state=\"released\"} 1\n", "agentgate_ports{state=\"closed\"} 1\n"}) {
    EXPECT_NE(answer.body.find(line), std::string::npos) << line << answer.body;
  }
  // Every metric is in the reference.
  std::ifstream file(AGENTGATE_API_REFERENCE);
  const std::string reference((std::istreambuf_iterator<char>(file)), {});
  std::istringstream lines(answer.body);
  int metrics = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("# TYPE ", 0) != 0) continue;
    ++metrics;
    const std::string name = line.substr(7, line.find(' ', 7) - 7);
    EXPECT_NE(reference.find(name), std::string::npos) << name << " is not in docs/api.md";
  }
  EXPECT_GT(metrics, 10);
}

TEST_F(ControlTest, AnswersAreAsDocumented) {
  service_.report.steps = {{1, "preconditions", "capabilities", arm::StepOutcome::ok, "all", 0.12},
                           {2, "preconditions", "engine", arm::StepOutcome::failed, "none", 1}};
  service_.report.differences = {"a"};
  service_.report.notes = {"b"};
  for (const auto outcome : {arm::Outcome::released, arm::Outcome::refused, arm::Outcome::undone,
                             arm::Outcome::inconsistent, arm::Outcome::closed}) {
    service_.report.outcome = outcome;
    for (const char* path : {"/v1/arm", "/v1/disarm", "/v1/check"}) {
      expect_documented("POST", path, R"({"container":"a1"})", 200);
    }
  }
  expect_documented("POST", "/v1/arm", "{}", 400);
  expect_documented("POST", "/v1/disarm", "{}", 400);
  expect_documented("POST", "/v1/check", "{}", 400);
  expect_documented("POST", "/v1/refresh", "[]", 400);

  service_.refreshed = {{"web", "abc", true, "", {"a 192.0.2.1"}, {"b"}, {"c"}, 3},
                        {"old", "", false, "no file", {}, {}, {}, 0}};
  expect_documented("POST", "/v1/refresh", "", 200);
  EXPECT_EQ(expect_200("POST", "/v1/refresh")["exit"], 1);
  service_.refreshed.pop_back();
  EXPECT_EQ(expect_200("POST", "/v1/refresh")["exit"], 0);

  service_.findings = {{"kernel.owner", "ok", "yes", ""},
                       {"engine.api", "missing", "no", "start it"}};
  expect_documented("GET", "/v1/doctor", "", 200);
  EXPECT_EQ(expect_200("GET", "/v1/doctor")["exit"], 1);
  expect_documented("GET", "/v1/version", "", 200);

  NetworkRecord network;
  network.id = NetworkId::parse(std::string(64, 'a')).value();
  network.gateway4 = Ipv4InterfaceAddress::parse("10.99.0.1/24").value();
  EndpointRecord endpoint;
  endpoint.id = EndpointId::parse(std::string(64, 'b')).value();
  endpoint.network = network.id;
  endpoint.address6 = Ipv6Address::parse("fd99::2").value();
  EndpointRecord released = endpoint;
  released.release = Release{"cid", "a1", {7, 8}, "web", "2026-01-01T00:00:00.000Z"};
  service_.snapshot.networks = {network};
  service_.snapshot.endpoints = {endpoint, released};
  service_.snapshot.incidents = {"x\xff"};
  expect_documented("GET", "/v1/health", "", 503);
  service_.snapshot.ready = true;
  expect_documented("GET", "/v1/status", "", 200);
  expect_documented("GET", "/v1/health", "", 200);
  const json status = expect_200("GET", "/v1/status");
  EXPECT_EQ(status["engine_guard"]["connected"], false);
  service_.guarded = {true, "2026-01-02T03:04:05.678Z", "", 2, 3, {}};
  const json guard = expect_200("GET", "/v1/status")["engine_guard"];
  EXPECT_EQ(guard["connected"], true);
  EXPECT_EQ(guard["losses"], 2);
  EXPECT_EQ(guard["closed"], 3);
  EXPECT_EQ(expect_200("GET", "/v1/health")["counters"]["engine_guard_closed"], 3);
  EXPECT_EQ(status["endpoints"][0]["state"], "closed");
  EXPECT_EQ(status["endpoints"][1]["state"], "released");
  EXPECT_EQ(status["endpoints"][1]["port"], "agpbbbbbbbbbb");
  EXPECT_EQ(status["networks"][0]["gateway6"], nullptr);
}

}  // namespace
}  // namespace agentgate::control

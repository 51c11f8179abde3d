// SPDX-License-Identifier: GPL-2.0-or-later
//
// The command line against a daemon that is a function.
#include "plugin/cli/cli.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "plugin/cli/render.h"
#include "plugin/http/server.h"

namespace agentgate::cli {
namespace {

using nlohmann::json;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_PRED2(has, text, part)

class CliTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/agentgate-cli-XXXXXX";
    directory_ = ::mkdtemp(pattern);
    socket_ = (directory_ / "control.sock").string();
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }
  void serve(std::function<http::Response(const http::Request&)> handler) {
    http::Options options;
    options.socket = socket_;
    auto started = http::Server::start(options, [this, handler](const http::Request& request) {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request.method + " " + request.path + " " + request.body);
      return handler(request);
    });
    ASSERT_TRUE(started) << started.error().to_string();
    server_ = std::move(*started);
  }
  // Answers every report with the exit code that stands in the container's name ("a3" -> 3).
  void serve_reports() {
    serve([](const http::Request& request) {
      const std::string container = json::parse(request.body)["container"];
      const int exit = container.back() - '0';
      return http::Response{
          200,
          json{{"version", 1},
               {"operation", "arm"},
               {"container", container},
               {"outcome", exit == 0 ? "released" : "refused"},
               {"code", exit == 1 ? "GATED_UNARMED" : ""},
               {"exit", exit},
               {"policy", "web"},
               {"policy_revision", "abc123"},
               {"reason", exit == 0 ? "" : "step 5: the container is not paused; docker pause it"},
               {"ms", 8.25},
               {"steps",
                {{{"step", 5},
                  {"phase", "preconditions"},
                  {"name", "container"},
                  {"outcome", exit == 0 ? "ok" : "failed"},
                  {"evidence", "seen\n\x1b[2J"},
                  {"ms", 0.5}}}},
               {"differences", json::array()},
               {"notes", {"drift"}}}
              .dump()};
    });
  }
  int run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"agentgate", "--socket", socket_});
    std::vector<const char*> argv;
    for (const auto& argument : arguments) argv.push_back(argument.c_str());
    out_.str("");
    err_.str("");
    return cli::run(static_cast<int>(argv.size()), argv.data(), out_, err_);
  }
  std::string write(const std::string& name, const std::string& text) {
    const auto path = directory_ / name;
    std::ofstream(path) << text;
    return path.string();
  }

  std::filesystem::path directory_;
  std::string socket_;
  std::unique_ptr<http::Server> server_;
  std::mutex mutex_;
  std::vector<std::string> requests_;
  std::ostringstream out_, err_;
};

TEST_F(CliTest, ArmPrintsStepsAndReturnsTheExitCode) {
  serve_reports();
  EXPECT_EQ(run({"arm", "a0"}), 0);
  EXPECT_HAS(out_.str(), "a0: released to policy web (abc123)");
  EXPECT_HAS(out_.str(), "container");
  EXPECT_HAS(out_.str(), "note: drift");
  EXPECT_EQ(out_.str().find('\x1b'), std::string::npos);  // nothing steers the terminal
  EXPECT_EQ(run({"arm", "a1", "--policy", "web"}), 1);
  EXPECT_HAS(out_.str(), "still closed (GATED_UNARMED): step 5: the container is not paused");
  EXPECT_EQ(run({"check", "a3"}), 3);
  EXPECT_EQ(run({"disarm", "a0"}), 0);
  EXPECT_EQ(
      requests_,
      (std::vector<std::string>{
          R"(POST /v1/arm {"container":"a0"})", R"(POST /v1/arm {"container":"a1","policy":"web"})",
          R"(POST /v1/check {"container":"a3"})", R"(POST /v1/disarm {"container":"a0"})"}));
}

TEST_F(CliTest, SeveralNamesGiveTheWorstExitCode) {
  serve_reports();
  EXPECT_EQ(run({"--json", "arm", "a0", "b2", "c1"}), 2);
  std::istringstream lines(out_.str());
  std::vector<std::string> names;
  for (std::string line; std::getline(lines, line);)
    names.push_back(json::parse(line)["container"]);
  EXPECT_EQ(names, (std::vector<std::string>{"a0", "b2", "c1"}));
}

TEST_F(CliTest, JsonCanStandAnywhere) {
  serve_reports();
  EXPECT_EQ(run({"arm", "a0", "--json"}), 0);
  EXPECT_EQ(json::parse(out_.str())["exit"], 0);
}

TEST_F(CliTest, NobodyAnswersIsFour) {
  EXPECT_EQ(run({"status"}), kExitUnreachable);
  EXPECT_HAS(err_.str(), "is agentgated running?");
  EXPECT_TRUE(out_.str().empty());
  EXPECT_EQ(run({"arm", "a0", "a1"}), kExitUnreachable);
}

TEST_F(CliTest, NonsenseFromTheDaemonIsFour) {
  serve([](const http::Request&) { return http::Response{200, "not json"}; });
  EXPECT_EQ(run({"status"}), kExitUnreachable);
  server_.reset();
  serve([](const http::Request&) { return http::Response{200, "[1]"}; });
  EXPECT_EQ(run({"arm", "x"}), kExitUnreachable);
  server_.reset();
  // Right types nowhere: rendered as nothing, no crash.
  serve([](const http::Request&) {
    return http::Response{200, R"({"steps":[1,{"ms":"x"}],"policies":[3],"networks":{},
        "endpoints":[null],"findings":[[]],"version":[],"reasons":7,"exit":"x","ms":"y"})"};
  });
  for (const char* command : {"status", "doctor", "version", "refresh", "health"}) {
    EXPECT_EQ(run({command}), 0) << command << err_.str();
  }
  EXPECT_EQ(run({"arm", "x"}), 0);
}

TEST_F(CliTest, ABadRequestIsUsage) {
  serve([](const http::Request&) {
    return http::Response{400, R"({"error":{"field":"container","text":"is no name"}})"};
  });
  EXPECT_EQ(run({"arm", "a?"}), kExitUsage);
  EXPECT_HAS(err_.str(), "container: is no name");
}

TEST_F(CliTest, ATimeoutIsFour) {
  serve([](const http::Request&) {
    ::usleep(600000);
    return http::Response{200, "{}"};
  });
  EXPECT_EQ(run({"--timeout", "0.2", "status"}), kExitUnreachable);
  EXPECT_HAS(err_.str(), "timeout");
}

TEST_F(CliTest, UsageIsSixtyFour) {
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"fly"},
                                             {"arm"},
                                             {"arm", "a", "--fly"},
                                             {"--timeout", "x", "status"},
                                             {"--timeout", "0", "status"},
                                             {"policy"},
                                             {"policy", "check"},
                                             {"refresh", "--all", "--policy", "x"},
                                             {"status", "extra"}}) {
    EXPECT_EQ(run(arguments), kExitUsage);
    EXPECT_FALSE(err_.str().empty());
  }
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_HAS(out_.str(), "Exit codes");
}

TEST_F(CliTest, HelpIsDockersWhereDockerCalls) {
  for (const auto& [program, usage] : {std::pair{"agentgate", "Usage: agentgate"},
                                       std::pair{"docker-agentgate", "Usage: docker agentgate"}}) {
    for (const char* command : {"arm", "run"}) {
      const char* const argv[] = {program, command, "--help"};
      out_.str("");
      EXPECT_EQ(cli::run(3, argv, out_, err_), 0);
      EXPECT_HAS(out_.str(), std::string(usage) + " " + command);
    }
  }
}

TEST_F(CliTest, CompletionForDocker) {
  const auto complete = [&](std::vector<const char*> words) {
    words.insert(words.begin(), {"docker-agentgate", "__complete", "agentgate"});
    out_.str("");
    EXPECT_EQ(cli::run(static_cast<int>(words.size()), words.data(), out_, err_), 0);
    return out_.str();
  };
  EXPECT_EQ(complete({"disa"}), "disarm\tClose containers again; their live flows are cut\n:4\n");
  EXPECT_HAS(complete({""}), "run\t");
  EXPECT_HAS(complete({"policy", ""}), "list\t");
  EXPECT_HAS(complete({"run", "--p"}), "--policy\t");
  EXPECT_EQ(complete({"arm", "a"}), ":4\n");
}

TEST_F(CliTest, MetadataForDocker) {
  const char* const argv[] = {"docker-agentgate", "docker-cli-plugin-metadata"};
  EXPECT_EQ(cli::run(2, argv, out_, err_), 0);
  EXPECT_EQ(json::parse(out_.str())["SchemaVersion"], "0.1.0");
}

TEST_F(CliTest, RefreshAsksForOneOrAll) {
  serve([](const http::Request&) {
    return http::Response{200, R"({"version":1,"operation":"refresh","exit":1,"policies":[
      {"policy":"web","revision":"abc","ok":true,"error":"","added":["n 192.0.2.1"],"removed":[],
       "kept":["m 192.0.2.2"],"ports":2},
      {"policy":"old","revision":"","ok":false,"error":"no file","added":[],"removed":[],
       "kept":[],"ports":0}]})"};
  });
  EXPECT_EQ(run({"refresh"}), 1);
  EXPECT_HAS(out_.str(), "web (abc): refreshed for 2 ports");
  EXPECT_HAS(out_.str(), "+ n 192.0.2.1");
  EXPECT_HAS(out_.str(), "failed: no file");
  EXPECT_EQ(run({"refresh", "--all"}), 1);
  EXPECT_EQ(run({"refresh", "--policy", "web"}), 1);
  EXPECT_EQ(requests_, (std::vector<std::string>{"POST /v1/refresh {}", "POST /v1/refresh {}",
                                                 R"(POST /v1/refresh {"policy":"web"})"}));
}

TEST_F(CliTest, StatusHealthDoctorVersion) {
  serve([](const http::Request& request) {
    if (request.path == "/v1/status") {
      return http::Response{200, R"({"version":1,"ready":true,"failure":"","features":{},
        "engine_guard":{"connected":false,"since":"","reason":"no engine","losses":1,"closed":0},
        "networks":[{"id":"0123456789abcdef","bridge":"agn0123456789","gateway4":"10.99.0.1/24",
                     "gateway6":null,"policy":"default"}],
        "endpoints":[{"id":"b","port":"agpbbbbbbbbbb","address4":"10.99.0.2","address6":null,
                      "policy":"","state":"released",
                      "release":{"container_name":"a1","policy":"web"}}],
        "incidents":["port x was closed"]})"};
    }
    if (request.path == "/v1/health") {
      return http::Response{503, R"({"version":1,"healthy":false,"reasons":["no kernel"]})"};
    }
    if (request.path == "/v1/doctor") {
      return http::Response{200, R"({"version":1,"exit":1,"findings":[{"check":"kernel.owner",
        "outcome":"missing","seen":"no","mend":"a newer kernel"}]})"};
    }
    return http::Response{200, R"({"version":"0.1.0","api":1})"};
  });
  EXPECT_EQ(run({"status"}), 0);
  EXPECT_HAS(out_.str(), "agn0123456789");
  EXPECT_HAS(out_.str(), "released");
  EXPECT_HAS(out_.str(), "a1");
  EXPECT_HAS(out_.str(), "port x was closed");
  EXPECT_HAS(out_.str(), "NOT CONNECTED");
  EXPECT_HAS(out_.str(), "no engine");
  EXPECT_EQ(run({"health"}), 1);
  EXPECT_HAS(out_.str(), "no kernel");
  EXPECT_EQ(run({"doctor"}), 1);
  EXPECT_HAS(out_.str(), "no; a newer kernel");
  EXPECT_EQ(run({"version"}), 0);
  EXPECT_HAS(out_.str(), "agentgated");
}

TEST_F(CliTest, PolicyCheckNeedsNoDaemon) {
  const std::string bad = write("bad.json", "{\n  \"version\": 1,\n  \"alow\": []\n}\n");
  EXPECT_EQ(run({"policy", "check", bad}), 1);
  EXPECT_HAS(err_.str(), "bad.json:3:");
  EXPECT_EQ(run({"--json", "policy", "check", bad}), 1);
  const json answer = json::parse(out_.str());
  EXPECT_EQ(answer["ok"], false);
  EXPECT_FALSE(answer["errors"].empty());
  EXPECT_EQ(run({"policy", "check", (directory_ / "none.json").string()}), kExitUsage);
  EXPECT_EQ(run({"policy", "check", directory_.string()}), kExitUsage);
}

TEST_F(CliTest, PolicyListHasTheBuiltIn) {
  EXPECT_EQ(run({"policy", "list", "--policy-directory", (directory_ / "none").string()}), 0);
  EXPECT_HAS(out_.str(), "default");
}

// The words "--like-this" of a text. (std::regex does not survive -Werror with g++ 12 and ASan.)
std::set<std::string> options_in(const std::string& text) {
  const auto part = [](char c) { return (c >= 'a' && c <= 'z') || c == '-'; };
  std::set<std::string> out;
  for (std::size_t at = text.find("--"); at != std::string::npos; at = text.find("--", at)) {
    std::size_t end = at + 2;
    while (end < text.size() && part(text[end])) ++end;
    if (end - at > 3 && text[at + 2] != '-') out.insert(text.substr(at, end - at));
    at = end;
  }
  return out;
}

// Without lines that are somebody else's commands; a man page writes "-" as "\\-".
std::string read_document(const std::string& path) {
  std::ifstream stream(path);
  std::string out;
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind("docker ", 0) == 0 || line.rfind("agentgate run ", 0) == 0) continue;
    for (const char c : line) {
      if (c != '\\') out += c;
    }
    out += "\n";
  }
  return out;
}

// docs/cli.md and the man page name every command and option that there is, and no other option.
TEST_F(CliTest, TheDocumentsHaveEveryOption) {
  const std::string documents[] = {read_document(AGENTGATE_DOCS "/cli.md"),
                                   read_document(AGENTGATE_MAN "/agentgate.1")};
  const std::vector<std::vector<std::string>> commands{{},
                                                       {"run"},
                                                       {"arm"},
                                                       {"disarm"},
                                                       {"check"},
                                                       {"refresh"},
                                                       {"status"},
                                                       {"health"},
                                                       {"doctor"},
                                                       {"version"},
                                                       {"policy"},
                                                       {"policy", "check"},
                                                       {"policy", "list"}};
  std::set<std::string> known;
  for (auto command : commands) {
    for (const auto& document : documents) {
      if (!command.empty()) {
        EXPECT_HAS(document, command.back());
      }
    }
    command.emplace_back("--help");
    ASSERT_EQ(run(command), 0);
    known.merge(options_in(out_.str()));
  }
  for (const auto& document : documents) EXPECT_EQ(options_in(document), known);
}

}  // namespace
}  // namespace agentgate::cli

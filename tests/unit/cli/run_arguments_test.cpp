// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/cli/run_arguments.h"

#include <gtest/gtest.h>

namespace agentgate::cli {
namespace {

using Words = std::vector<std::string>;
using std::chrono::milliseconds;

// As clients print it, with lines that look like options and are none.
constexpr const char* kHelp = R"(
Usage:  docker run [OPTIONS] IMAGE [COMMAND] [ARG...]

Create and run a new container from an image

Aliases:
  docker container run, docker run

Options:
      --add-host list                    Add a custom host-to-IP mapping
                                         (host:ip), unlike --no-such
  -a, --attach list                      Attach to STDIN, STDOUT or STDERR
      --cidfile string                   Write the container ID to the file
  -d, --detach                           Run container in background and
                                         print container ID
      --detach-keys string               Override the key sequence for
      --disable-content-trust            Skip image verification (default
                                         --true)
  -e, --env list                         Set environment variables
      --help                             Print usage
      --health-start-interval duration   Time between running the checks
  -i, --interactive                      Keep STDIN open even if not attached
      --name string                      Assign a name to the container
      --network network                  Connect a container to a network
      --rm                               Automatically remove the
      --sig-proxy                        Proxy received signals to the
  -t, --tty                              Allocate a pseudo-TTY
)";

Result<RunArguments> parse(const Words& words) {
  return parse_run(words, parse_docker_help(kHelp));
}
Words create(const Words& words) {
  const auto parsed = parse(words);
  EXPECT_TRUE(parsed) << parsed.error().text;
  return parsed ? parsed->create : Words{"error"};
}

// The word after a hidden flag is the image, and what follows that is the container's.
TEST(RunArgumentsTest, HiddenFlagsTakeNoValue) {
  for (const char* hidden : {"--disable-content-trust", "--use-api-socket"}) {
    const auto parsed =
        parse_run({hidden, "img", "--policy", "open"}, parse_docker_help("      --rm    Remove\n"));
    ASSERT_TRUE(parsed) << parsed.error().text;
    EXPECT_EQ(parsed->policy, "");
    EXPECT_EQ(parsed->create, (Words{hidden, "img", "--policy", "open"}));
  }
}

TEST(RunArgumentsTest, TheLabelOfTheRunIsOurs) {
  const auto flags = parse_docker_help("  -l, --label list   Set\n");
  for (const Words& words :
       {Words{"--label", "agentgate.run=x", "img"}, Words{"--label=agentgate.run", "img"},
        Words{"-lagentgate.run=x", "img"}, Words{"-l", "agentgate.run=x", "img"}}) {
    EXPECT_FALSE(parse_run(words, flags)) << words.front();
  }
  EXPECT_TRUE(parse_run({"--label", "agentgate.runner=x", "img", "-l", "agentgate.run=x"}, flags));
}

TEST(RunArgumentsTest, TheHelpSaysWhatTakesAValue) {
  const auto flags = parse_docker_help(kHelp);
  EXPECT_EQ(flags.without_value,
            (std::set<std::string>{"detach", "disable-content-trust", "help", "interactive", "rm",
                                   "sig-proxy", "tty", "use-api-socket"}));
  EXPECT_EQ(
      flags.short_names,
      (std::map<char, std::string>{
          {'a', "attach"}, {'d', "detach"}, {'e', "env"}, {'i', "interactive"}, {'t', "tty"}}));
}

TEST(RunArgumentsTest, WhatIsNotOursGoesOnAsItStands) {
  const Words words{"--name",   "a1",       "--rm",     "-e",  "A=-d", "-eB=1", "--env=C",
                    "--memory", "512m",     "--new=-x", "-it", "-m",   "1g",    "img",
                    "-d",       "--policy", "is-args",  "--",  "-t",   "--help"};
  EXPECT_EQ(create(words), words);
  const auto parsed = parse(words);
  EXPECT_FALSE(parsed->detach);
  EXPECT_TRUE(parsed->policy.empty());
  EXPECT_TRUE(parsed->interactive && parsed->tty);
  EXPECT_EQ(create({"--rm", "--", "-image", "-d"}), (Words{"--rm", "--", "-image", "-d"}));
}

TEST(RunArgumentsTest, OursAndThoseOfRunAloneAreTakenOut) {
  const auto parsed =
      parse({"--policy", "web", "--name", "--policy", "--wait-ready=1m30s", "-d", "--detach-keys",
             "ctrl-x", "--sig-proxy", "--sig-proxy=true", "img", "sleep"});
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->policy, "web");
  EXPECT_EQ(parsed->wait_ready, milliseconds(90000));
  EXPECT_TRUE(parsed->detach);
  EXPECT_EQ(parsed->detach_keys, "ctrl-x");
  EXPECT_EQ(parsed->create, (Words{"--name", "--policy", "img", "sleep"}));
}

TEST(RunArgumentsTest, ShortOptionsTogether) {
  EXPECT_EQ(create({"-dit", "img"}), (Words{"-it", "img"}));
  EXPECT_EQ(create({"-itd", "img"}), (Words{"-it", "img"}));
  EXPECT_EQ(create({"-d", "img"}), Words{"img"});
  EXPECT_EQ(create({"-de", "A=1", "img"}), (Words{"-e", "A=1", "img"}));
  EXPECT_EQ(create({"-ideA=d", "img"}), (Words{"-ieA=d", "img"}));
  EXPECT_EQ(create({"-id=false", "img"}), (Words{"-i", "img"}));
  EXPECT_FALSE(parse({"-d=false", "img"})->detach);
  EXPECT_FALSE(parse({"--detach=0", "img"})->detach);
  EXPECT_TRUE(parse({"-d=True", "img"})->detach);
  EXPECT_FALSE(parse({"-ed", "img"})->detach);  // that is -e d
  EXPECT_TRUE(parse({"-dit", "img"})->detach);
}

TEST(RunArgumentsTest, WhatIsNoted) {
  EXPECT_FALSE(parse({"img"})->network);
  EXPECT_FALSE(parse({"img", "--network", "x"})->network);
  EXPECT_TRUE(parse({"--network", "x", "img"})->network);
  EXPECT_TRUE(parse({"--net=x", "img"})->network);
  EXPECT_EQ(parse({"--cidfile=/f", "img"})->cidfile, "/f");
  EXPECT_EQ(parse({"-a", "STDOUT", "--attach=stderr,stdin", "img"})->attach,
            (std::set<std::string>{"stdin", "stdout", "stderr"}));
  EXPECT_TRUE(parse({"--help"})->help);
  EXPECT_TRUE(parse({"-d", "--help", "img"})->help);
}

TEST(RunArgumentsTest, Refusals) {
  for (const Words& words : std::vector<Words>{{},
                                               {"-d"},
                                               {"--rm", "--"},
                                               {"--name"},
                                               {"--name", "a1"},
                                               {"-e"},
                                               {"--policy"},
                                               {"--policy=", "img"},
                                               {"--wait-ready", "soon", "img"},
                                               {"--detach=perhaps", "img"},
                                               {"--sig-proxy=false", "img"},
                                               {"-a", "stdout", "img"},
                                               {"-d", "-a", "stdout", "-a", "stderr", "img"}}) {
    EXPECT_FALSE(parse(words)) << (words.empty() ? "" : words[0]);
  }
}

TEST(RunArgumentsTest, Durations) {
  EXPECT_EQ(parse_duration("500ms"), milliseconds(500));
  EXPECT_EQ(parse_duration("30"), milliseconds(30000));
  EXPECT_EQ(parse_duration("1.5s"), milliseconds(1500));
  EXPECT_EQ(parse_duration("1h1m1s"), milliseconds(3661000));
  EXPECT_EQ(parse_duration("0s"), milliseconds(0));
  for (const char* bad : {"", "s", "1x", "-1s", "1..5s", ".", "1m30", "99h", "1s ", "1e9s"}) {
    EXPECT_FALSE(parse_duration(bad)) << bad;
  }
}

}  // namespace
}  // namespace agentgate::cli

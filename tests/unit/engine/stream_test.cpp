// SPDX-License-Identifier: GPL-2.0-or-later
//
// The engine's events as bytes: whole, cut anywhere, and wrong.
#include "plugin/engine/stream.h"

#include <gtest/gtest.h>

namespace agentgate::engine {
namespace {

const std::string kHead = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
const std::string kChunked = kHead + "Transfer-Encoding: chunked\r\n\r\n";
// As 28.5 sends them.
const std::string kStart =
    R"({"status":"start","id":"c1","from":"img","Type":"container","Action":"start","Actor":{"ID":"c1",)"
    R"("Attributes":{"image":"img","name":"a1"}},"scope":"local","time":1,"timeNano":1000000001})"
    "\n";
const std::string kConnect =
    R"({"Type":"network","Action":"connect","Actor":{"ID":"n1","Attributes":{"container":"c1",)"
    R"("name":"second","type":"bridge"}},"scope":"local","time":1,"timeNano":1000000002})"
    "\n";
const std::vector<Event> kBoth = {{"container", "start", "c1", "a1"},
                                  {"network", "connect", "c1", "second"}};

std::string chunk(const std::string& text) {
  std::array<char, 32> length{};
  std::snprintf(length.data(), length.size(), "%zx\r\n", text.size());
  return length.data() + text + "\r\n";
}

struct Fed {
  std::vector<Event> events;
  Status status;
  EventStream stream;
};
Fed feed(const std::string& bytes, std::size_t step) {
  Fed out;
  for (std::size_t at = 0; at < bytes.size() && out.status; at += step) {
    out.status = out.stream.feed(std::string_view(bytes).substr(at, step),
                                 [&](const Event& event) { out.events.push_back(event); });
  }
  return out;
}

void refused(const std::string& bytes, int code, const std::string& words) {
  for (const std::size_t step : {std::size_t{1}, std::size_t{100}, bytes.size()}) {
    const Fed fed = feed(bytes, step);
    ASSERT_FALSE(fed.status) << words;
    EXPECT_EQ(fed.status.error().code, code) << words;
    EXPECT_NE(fed.status.error().text.find(words), std::string::npos) << fed.status.error().text;
  }
}

TEST(EventStream, AnyCutGivesTheSameEvents) {
  const std::string both = kStart + kConnect;
  const std::string whole[] = {
      kChunked + chunk(kStart) + chunk(kConnect),
      kChunked + chunk(both),
      kChunked + chunk(both.substr(0, 10)) + chunk(both.substr(10, 200)) + chunk(both.substr(210)),
      kHead + "\r\n" + both,
      kHead + "transfer-encoding:Chunked\r\n\r\n" + "1;ext=1\r\n\n\r\n" + chunk("\r\n" + both),
  };
  for (const std::string& bytes : whole) {
    for (std::size_t step = 1; step <= bytes.size(); ++step) {
      const Fed fed = feed(bytes, step);
      ASSERT_TRUE(fed.status) << fed.status.error().to_string();
      ASSERT_EQ(fed.events, kBoth) << step;
      EXPECT_TRUE(fed.stream.agreed());
      EXPECT_TRUE(fed.stream.whole());
    }
  }
}

TEST(EventStream, KnowsWhatIsHalfRead) {
  EXPECT_FALSE(feed(kHead, 1000).stream.agreed());
  EXPECT_TRUE(feed(kChunked, 1000).stream.whole());
  EXPECT_FALSE(feed(kChunked + "1", 1000).stream.whole());
  EXPECT_FALSE(feed(kChunked + chunk("{"), 1000).stream.whole());
}

TEST(EventStream, WhatIsNotAStreamOfEvents) {
  refused("SSH-2.0-OpenSSH\r\n\r\n", EPROTO, "no answer of HTTP");
  refused("HTTP/1.1 400 Bad Request\r\n\r\n{}", EPROTO, "400 bad request");
  refused(kChunked + "x\r\n", EPROTO, "without a length");
  refused(kChunked + "-1\r\n", EPROTO, "without a length");
  refused(kChunked + "11111111111111111111\r\n", EPROTO, "without a length");
  refused(kChunked + "2\r\n{}{}\r\n", EPROTO, "longer than it said");
  refused(kChunked + chunk("nonsense\n"), EPROTO, "not a JSON object");
  refused(kChunked + chunk("[]\n"), EPROTO, "not a JSON object");
  refused(kChunked + chunk("{\"Type\":1}\n"), EPROTO, "\"Type\"");
  refused(kChunked + "0\r\n\r\n", ECONNRESET, "ended");
}

TEST(EventStream, WhatDoesNotEndIsNotKept) {
  refused(std::string(100000, 'x'), EPROTO, "no end of line");
  refused(kHead + "X: " + std::string(100000, 'x'), EPROTO, "no end of line");
  refused(kChunked + std::string(1000, '1'), EPROTO, "no end of line");
  const std::string endless(kMaxEventLine + 1, 'x');
  for (const std::string& bytes : {kHead + "\r\n" + endless, kChunked + chunk(endless)}) {
    const Fed fed = feed(bytes, 16384);
    ASSERT_FALSE(fed.status);
    EXPECT_NE(fed.status.error().text.find("1 MiB"), std::string::npos);
  }
  const std::string longest = R"({"Type":"network","Action":"create","x":")" +
                              std::string(kMaxEventLine - 100, 'x') + "\"}\n";
  EXPECT_TRUE(feed(kHead + "\r\n" + longest, 16384).status);
}

TEST(EventDecode, MissingAndWrongKeys) {
  for (const char* text :
       {"", "{", "null", "{}", R"({"Type":"container"})",
        R"({"Type":"container","Action":"start"})",
        R"({"Type":"container","Action":"start","Actor":{"ID":1}})",
        R"({"Type":"network","Action":["x"]})", R"({"Type":"network","Action":"x","Actor":[]})"}) {
    const auto event = event_from_json(text);
    ASSERT_FALSE(event) << text;
    EXPECT_EQ(event.error().code, EPROTO);
  }
  // A network that is made is about no container.
  const auto made = event_from_json(R"({"Type":"network","Action":"create","Actor":null})");
  ASSERT_TRUE(made);
  EXPECT_EQ(made->container, "");
}

}  // namespace
}  // namespace agentgate::engine

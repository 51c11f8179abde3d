// SPDX-License-Identifier: GPL-2.0-or-later
//
// docs/policy.md and the parser must not drift apart: each key of each table is in the section of
// the page that is about it, each section names no other key, and the examples parse.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>

#include "plugin/policy/keys.h"
#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

std::string page() {
  std::ifstream in(std::string(SOURCE_DIR) + "/docs/policy.md");
  return {std::istreambuf_iterator<char>(in), {}};
}

// The first column of the table under "## <heading>", without its backticks.
std::set<std::string> keys_under(const std::string& heading) {
  const std::string text = page();
  const auto begin = text.find("\n## " + heading + "\n");
  if (begin == std::string::npos) return {};
  const std::string section = text.substr(begin + 1, text.find("\n## ", begin + 1) - begin - 1);
  std::set<std::string> out;
  const std::string row = "\n| `";
  for (auto at = section.find(row); at != std::string::npos; at = section.find(row, at + 1)) {
    const auto key = at + row.size();
    out.insert(section.substr(key, section.find('`', key) - key));
  }
  return out;
}

template <std::size_t N>
std::set<std::string> set_of(const std::array<const char*, N>& keys) {
  return {keys.begin(), keys.end()};
}

TEST(Docs, NameEveryKeyAndNoOther) {
  EXPECT_EQ(keys_under("The file"), set_of(kPolicyKeys));
  EXPECT_EQ(keys_under("Entries of `allow`"), set_of(kAllowKeys));
  EXPECT_EQ(keys_under("Entries of `deny`"), set_of(kDenyKeys));
  EXPECT_EQ(keys_under("Entries of `private`"), set_of(kPrivateKeys));
}

TEST(Docs, ExamplesParse) {
  const std::string text = page();
  unsigned seen = 0;
  for (std::size_t at = text.find("```json\n"); at != std::string::npos;
       at = text.find("```json\n", at + 8)) {
    const std::string example = text.substr(at + 8, text.find("\n```", at + 8) - at - 8);
    const ParseResult result =
        parse(example, "example", "docs/policy.md, example " + std::to_string(++seen));
    for (const auto& line : result.errors) ADD_FAILURE() << line;
    for (const auto& line : result.warnings) ADD_FAILURE() << line;
  }
  EXPECT_GE(seen, 2U);
}

}  // namespace
}  // namespace agentgate::policy

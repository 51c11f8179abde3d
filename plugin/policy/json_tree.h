// SPDX-License-Identifier: GPL-2.0-or-later
//
// JSON with places: a small tree in which every value knows its line and column, and in which a
// key that stands twice is an error. nlohmann's reader does the reading (its SAX interface).
// Knows nothing of policies. Pure; may be used from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "netdriver/error.h"

namespace agentgate::policy {

struct Place {
  unsigned line = 1, column = 1;
};

struct Node {
  enum class Kind { null, boolean, integer, number, string, array, object };
  Kind kind = Kind::null;
  Place at;
  bool boolean = false;
  std::int64_t integer = 0;
  std::string string;
  std::vector<Node> items;        // array; object: values
  std::vector<std::string> keys;  // object, in step with items
  std::vector<Place> key_places;

  [[nodiscard]] const Node* find(std::string_view key) const;
};

[[nodiscard]] const char* to_string(Node::Kind kind);

struct TreeResult {
  struct Problem {
    Place at;
    std::string text;
  };
  Node root;
  bool complete = false;          // false: not JSON, and `root` is of no use
  std::vector<Problem> problems;  // what is not JSON, or each key that stands twice
};
// Bounds, so that no text can cost more than its size: 16 levels, 64 keys in an object, 200,000
// values. A second value under one key is not in the tree.
[[nodiscard]] TreeResult read_tree(std::string_view text);

// `text` in single quotes, fit for a terminal: control characters as '.', cut after 100 bytes.
[[nodiscard]] std::string quote(std::string_view text);

}  // namespace agentgate::policy

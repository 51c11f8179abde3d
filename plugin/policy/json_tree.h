// SPDX-License-Identifier: GPL-2.0-or-later
//
// JSON with places: a small tree in which every value knows its line and column, and in which a
// key that stands twice is an error. nlohmann's reader does the reading (its SAX interface).
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
  std::vector<Node> items;         // array; object: values
  std::vector<std::string> keys;   // object, in step with items
  std::vector<Place> key_places;

  [[nodiscard]] const Node* find(std::string_view key) const;
};

[[nodiscard]] const char* to_string(Node::Kind kind);

struct TreeResult {
  Node root;
  std::string error;  // empty when good
  Place at;           // of the error
};
// At most 16 levels deep.
[[nodiscard]] TreeResult read_tree(std::string_view text);

}  // namespace agentgate::policy

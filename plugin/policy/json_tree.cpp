// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/policy/json_tree.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include <nlohmann/json.hpp>

namespace agentgate::policy {
namespace {

constexpr std::size_t kMaxDepth = 16;

// Tells how far the reader has come.
struct Cursor {
  const char* at = nullptr;
};
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  CountingIterator(const char* at, Cursor* cursor) : at_(at), cursor_(cursor) {}
  const char& operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    cursor_->at = at_;
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  Cursor* cursor_;
};

class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  Reader(std::string_view text, const Cursor& cursor, TreeResult& result)
      : text_(text), cursor_(cursor), result_(result) {}

  bool null() override { return put(Node::Kind::null); }
  bool boolean(bool value) override {
    return put(Node::Kind::boolean, [&](Node& node) { node.boolean = value; });
  }
  bool number_integer(number_integer_t value) override {
    return put(Node::Kind::integer, [&](Node& node) { node.integer = value; });
  }
  bool number_unsigned(number_unsigned_t value) override {
    return put(Node::Kind::integer, [&](Node& node) {
      node.integer = value > std::numeric_limits<std::int64_t>::max()
                         ? std::numeric_limits<std::int64_t>::max()
                         : static_cast<std::int64_t>(value);
    });
  }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    return put(Node::Kind::number);
  }
  bool string(string_t& value) override {
    return put(Node::Kind::string, [&](Node& node) { node.string = std::move(value); });
  }
  bool binary(binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*count*/) override { return open(Node::Kind::object); }
  bool start_array(std::size_t /*count*/) override { return open(Node::Kind::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& value) override {
    const Place at = token_start();
    Node& object = *stack_.back();
    if (std::find(object.keys.begin(), object.keys.end(), value) != object.keys.end()) {
      return stop("key \"" + value + "\" stands twice; keep one of them", at);
    }
    object.keys.push_back(std::move(value));
    object.key_places.push_back(at);
    return true;
  }
  bool parse_error(std::size_t /*position*/, const std::string& token,
                   const nlohmann::detail::exception& /*error*/) override {
    // The reader's own text speaks of its insides; the place is what helps.
    return stop(token.empty() ? "the file ends in the middle of the JSON"
                              : "not JSON at this place (near " + printable(token) + ")",
                place_of(static_cast<std::size_t>(cursor_.at - text_.data())));
  }

 private:
  static std::string printable(const std::string& token) {
    std::string out = "'";
    for (const char c : token.substr(0, 40)) out += c >= 0x20 && c < 0x7F ? c : '.';
    return out + "'";
  }
  bool stop(std::string text, Place at) {
    if (result_.error.empty()) {
      result_.error = std::move(text);
      result_.at = at;
    }
    return false;
  }
  Place place_of(std::size_t offset) {
    offset = std::min(offset, text_.size());
    if (offset < scanned_) {
      scanned_ = 0;
      place_ = {};
    }
    for (; scanned_ < offset; ++scanned_) {
      if (text_[scanned_] == '\n') {
        ++place_.line;
        place_.column = 1;
      } else {
        ++place_.column;
      }
    }
    return place_;
  }
  // The reader stands behind the token; it began at the first character after the last one that
  // is neither white space nor a separator.
  Place token_start() {
    std::size_t at = last_;
    while (at < text_.size() && std::string_view(" \t\r\n,:").find(text_[at]) != std::string::npos) {
      ++at;
    }
    last_ = static_cast<std::size_t>(cursor_.at - text_.data());
    return place_of(at);
  }
  template <class Fill = void (*)(Node&)>
  bool put(Node::Kind kind, const Fill& fill = [](Node&) {}) {
    Node node;
    node.kind = kind;
    node.at = token_start();
    fill(node);
    if (stack_.empty()) {
      result_.root = std::move(node);
    } else {
      stack_.back()->items.push_back(std::move(node));
    }
    return true;
  }
  bool open(Node::Kind kind) {
    if (stack_.size() >= kMaxDepth) return stop("nested too deeply", token_start());
    put(kind);
    stack_.push_back(stack_.empty() ? &result_.root : &stack_.back()->items.back());
    return true;
  }
  bool close() {
    last_ = static_cast<std::size_t>(cursor_.at - text_.data());
    stack_.pop_back();
    return true;
  }

  std::string_view text_;
  const Cursor& cursor_;
  TreeResult& result_;
  std::vector<Node*> stack_;  // only the last one of each level grows: no pointer moves
  std::size_t last_ = 0, scanned_ = 0;
  Place place_;
};

}  // namespace

const Node* Node::find(std::string_view key) const {
  for (std::size_t i = 0; i < keys.size() && i < items.size(); ++i) {
    if (keys[i] == key) return &items[i];
  }
  return nullptr;
}

const char* to_string(Node::Kind kind) {
  switch (kind) {
    case Node::Kind::null:
      return "null";
    case Node::Kind::boolean:
      return "true or false";
    case Node::Kind::integer:
      return "a whole number";
    case Node::Kind::number:
      return "a number with a fraction";
    case Node::Kind::string:
      return "a string";
    case Node::Kind::array:
      return "a list";
    case Node::Kind::object:
      return "an object";
  }
  return "?";
}

TreeResult read_tree(std::string_view text) {
  TreeResult result;
  Cursor cursor{text.data()};
  Reader reader(text, cursor, result);
  const bool good = nlohmann::json::sax_parse(CountingIterator(text.data(), &cursor),
                                              CountingIterator(text.data() + text.size(), &cursor),
                                              &reader, nlohmann::json::input_format_t::json, true);
  if (!good && result.error.empty()) result.error = "not JSON";
  return result;
}

}  // namespace agentgate::policy

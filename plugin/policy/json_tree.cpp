// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/policy/json_tree.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include <nlohmann/json.hpp>

namespace agentgate::policy {
namespace {

constexpr std::size_t kMaxDepth = 16;
constexpr std::size_t kMaxKeys = 64;
constexpr std::size_t kMaxValues = 200'000;

// Tells how far the reader has come.
struct Cursor {
  const char* at = nullptr;
  bool ended = false;  // it asked for more than there is
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
  bool operator==(const CountingIterator& other) const {
    if (at_ == other.at_) cursor_->ended = true;
    return at_ == other.at_;
  }
  bool operator!=(const CountingIterator& other) const { return !(*this == other); }

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
    if (object.keys.size() >= kMaxKeys) {
      return stop("more than " + std::to_string(kMaxKeys) + " keys in one object", at);
    }
    if (std::find(object.keys.begin(), object.keys.end(), value) != object.keys.end()) {
      result_.problems.push_back({at, "key " + quote(value) + " stands twice; keep one of them"});
    }
    object.keys.push_back(std::move(value));
    object.key_places.push_back(at);
    return true;
  }
  bool parse_error(std::size_t /*position*/, const std::string& token,
                   const nlohmann::detail::exception& /*error*/) override {
    // The reader's own text speaks of its insides; the place is what helps.
    const auto behind = static_cast<std::size_t>(cursor_.at - text_.data());
    if (started_ && stack_.empty()) {
      return stop("something stands behind the last '}'; remove it", place_of(last_));
    }
    if (cursor_.ended) return stop("the file ends in the middle of the JSON", place_of(behind));
    const std::size_t offset = behind == 0 ? 0 : behind - 1;
    if (text_[offset] == '\0') return stop("a NUL byte; this is not a text file", place_of(offset));
    if (text_[offset] == '/' || text_[offset] == '#') {
      return stop("JSON has no comments; write them under the key \"comment\"", place_of(offset));
    }
    return stop("not JSON at this place, near " + quote(token) +
                    "; look for a comma, quote or bracket that is missing or too much, or for "
                    "bytes that are not UTF-8",
                place_of(offset));
  }

 private:
  bool stop(std::string text, Place at) {
    if (!stopped_) result_.problems.push_back({at, std::move(text)});
    stopped_ = true;
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
    while (at < text_.size() &&
           std::string_view(" \t\r\n,:").find(text_[at]) != std::string::npos) {
      ++at;
    }
    last_ = static_cast<std::size_t>(cursor_.at - text_.data());
    return place_of(at);
  }
  template <class Fill = void (*)(Node&)>
  bool put(
      Node::Kind kind, const Fill& fill = [](Node&) {}) {
    Node node;
    node.kind = kind;
    node.at = token_start();
    if (++values_ > kMaxValues) return stop("more values than any policy has", node.at);
    fill(node);
    started_ = true;
    if (stack_.empty()) {
      result_.root = std::move(node);
    } else {
      stack_.back()->items.push_back(std::move(node));
    }
    return true;
  }
  bool open(Node::Kind kind) {
    if (stack_.size() >= kMaxDepth) return stop("nested too deeply", token_start());
    if (!put(kind)) return false;
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
  std::size_t last_ = 0, scanned_ = 0, values_ = 0;
  bool started_ = false, stopped_ = false;
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
  result.complete = nlohmann::json::sax_parse(CountingIterator(text.data(), &cursor),
                                              CountingIterator(text.data() + text.size(), &cursor),
                                              &reader, nlohmann::json::input_format_t::json, true);
  if (!result.complete && result.problems.empty()) result.problems.push_back({{}, "not JSON"});
  return result;
}

std::string quote(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 100)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte >= 0x7F ? '.' : c;
  }
  return out + (text.size() > 100 ? "…'" : "'");
}

}  // namespace agentgate::policy

// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/engine/stream.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace agentgate::engine {
namespace {

constexpr std::size_t kMaxHead = 16 << 10;
constexpr std::size_t kMaxLength = 256;  // a chunk's, with extensions

tl::unexpected<Error> bad(std::string text) {
  return fail("watch engine", std::move(text), EPROTO);
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

}  // namespace

Result<bool> EventStream::collect(std::string_view& bytes, std::string_view end, std::size_t most) {
  while (!bytes.empty()) {
    text_ += bytes.front();
    bytes.remove_prefix(1);
    if (text_.size() >= end.size() &&
        text_.compare(text_.size() - end.size(), end.size(), end) == 0) {
      return true;
    }
    if (text_.size() > most) return bad("its answer has no end of line where one must be");
  }
  return false;
}

Status EventStream::read_head() {
  const std::string head = lower(text_);
  text_.clear();
  if (head.rfind("http/1.", 0) != 0) return bad("no answer of HTTP");
  const std::string first = head.substr(0, head.find("\r\n"));
  if (first.find(" 200") != 8) return bad("the engine refuses to tell its events: " + first);
  bool chunked = false;
  for (std::size_t at = head.find("\r\n"); at != std::string::npos;
       at = head.find("\r\n", at + 2)) {
    const std::string_view line = std::string_view(head).substr(at + 2);
    if (line.rfind("transfer-encoding:", 0) != 0) continue;
    chunked = line.substr(0, line.find("\r\n")).find("chunked") != std::string_view::npos;
  }
  state_ = chunked ? State::length : State::plain;
  return {};
}

Status EventStream::read_length() {
  std::uint64_t length = 0;
  const auto [end, ec] = std::from_chars(text_.data(), text_.data() + text_.size(), length, 16);
  const bool good = ec == std::errc{} && (*end == '\r' || *end == '\n' || *end == ';');
  text_.clear();
  if (!good) return bad("a chunk without a length");
  if (length == 0) return fail("watch engine", "the engine ended the stream", ECONNRESET);
  left_ = length;
  state_ = State::chunk;
  return {};
}

Status EventStream::read_body(std::string_view bytes,
                              const std::function<void(const Event&)>& each) {
  while (!bytes.empty()) {
    const auto end = bytes.find('\n');
    const std::string_view part = bytes.substr(0, end);
    if (line_.size() + part.size() > kMaxEventLine) return bad("an event of more than 1 MiB");
    line_.append(part);
    if (end == std::string_view::npos) return {};
    bytes.remove_prefix(end + 1);
    const std::string line = std::exchange(line_, {});
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto event = event_from_json(line);
    if (!event) return tl::unexpected(event.error());
    each(*event);
  }
  return {};
}

Status EventStream::feed(std::string_view bytes, const std::function<void(const Event&)>& each) {
  while (!bytes.empty()) {
    Status status;
    switch (state_) {
      case State::head:
      case State::length: {
        const bool head = state_ == State::head;
        const auto whole = collect(bytes, head ? "\r\n\r\n" : "\n", head ? kMaxHead : kMaxLength);
        if (!whole) return tl::unexpected(whole.error());
        if (*whole) status = head ? read_head() : read_length();
        break;
      }
      case State::chunk: {
        const auto part = bytes.substr(0, std::min<std::uint64_t>(left_, bytes.size()));
        bytes.remove_prefix(part.size());
        left_ -= part.size();
        if (left_ == 0) state_ = State::chunk_end;
        status = read_body(part, each);
        break;
      }
      case State::chunk_end:  // an empty line
        if (bytes.front() == '\n')
          state_ = State::length;
        else if (bytes.front() != '\r')
          return bad("a chunk that is longer than it said");
        bytes.remove_prefix(1);
        break;
      case State::plain:
        status = read_body(bytes, each);
        bytes = {};
        break;
    }
    if (!status) return status;
  }
  return {};
}

}  // namespace agentgate::engine

// SPDX-License-Identifier: GPL-2.0-or-later
//
// The engine's event stream as bytes: an HTTP answer that does not end, in chunks or not, whose
// body is JSON, one event a line. Pure; for Engine::events and fuzzing. It keeps at most one head,
// one chunk's length or one line, each bounded: an engine that goes mad cannot make us grow.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "plugin/engine/engine.h"

namespace agentgate::engine {

class EventStream {
 public:
  // Any cut of the bytes gives the same events. After an error there is nothing more to feed.
  Status feed(std::string_view bytes, const std::function<void(const Event&)>& each);

  // The head is there and says yes.
  [[nodiscard]] bool agreed() const { return state_ != State::head; }
  // Nothing is half read.
  [[nodiscard]] bool whole() const { return text_.empty() && line_.empty(); }

 private:
  enum class State { head, length, chunk, chunk_end, plain };

  Status read_head();
  Status read_length();
  Status read_body(std::string_view bytes, const std::function<void(const Event&)>& each);
  // Appends to text_ up to and with `end`; whether it was found.
  Result<bool> collect(std::string_view& bytes, std::string_view end, std::size_t most);

  State state_ = State::head;
  std::string text_;        // of the head or a chunk's length
  std::string line_;        // of the body
  std::uint64_t left_ = 0;  // of the chunk
};

}  // namespace agentgate::engine

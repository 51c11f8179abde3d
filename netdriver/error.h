// SPDX-License-Identifier: GPL-2.0-or-later
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <tl/expected.hpp>

namespace agentgate {

// What went wrong, for a person and for the code that decides what to do next.
//
// `operation` says what was tried, in the words of the caller's domain ("create port agp01").
// `code` is the errno of the kernel (positive, 0 where none applies).
// `offset` is the byte in the request that the kernel objected to (NLMSGERR_ATTR_OFFS, counted
// from the netlink header), or the position in a text that failed to parse.
// `text` is the reason and, where a person caused it, the mend.
struct Error {
  std::string operation;
  int code = 0;
  std::optional<std::uint32_t> offset;
  std::string text;

  // One line: "operation: text (ENOENT: No such file or directory)".
  [[nodiscard]] std::string to_string() const;
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = tl::expected<void, Error>;

[[nodiscard]] inline tl::unexpected<Error> fail(std::string operation, std::string text,
                                                int code = 0) {
  return tl::unexpected<Error>(Error{std::move(operation), code, std::nullopt, std::move(text)});
}

// Takes errno as it stands: call it before anything else can change errno.
[[nodiscard]] tl::unexpected<Error> fail_errno(std::string operation, std::string text = {});

// The symbolic name of an errno value ("EBUSY"), or its number as text.
[[nodiscard]] std::string errno_name(int code);

}  // namespace agentgate

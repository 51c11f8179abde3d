// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/error.h"

#include <cstring>

namespace agentgate {

std::string errno_name(int code) {
  const char* name = ::strerrorname_np(code);
  return name != nullptr ? std::string(name) : std::to_string(code);
}

std::string Error::to_string() const {
  std::string out = operation;
  if (!text.empty()) {
    out += out.empty() ? text : ": " + text;
  }
  if (code != 0) {
    out += " (" + errno_name(code) + ": " + ::strerror(code) + ")";
  }
  return out;
}

tl::unexpected<Error> fail_errno(std::string operation, std::string text) {
  const int code = errno;
  return fail(std::move(operation), std::move(text), code);
}

}  // namespace agentgate

// SPDX-License-Identifier: GPL-2.0-or-later
//
// One request to a server on a Unix socket, for the command line.
// Threading: free function without state. Errors: ENOENT, EACCES, ECONNREFUSED: nobody can be
// asked; ETIMEDOUT: no answer in time; EPROTO: something that is not an HTTP answer.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>

#include "netdriver/error.h"
#include "plugin/http/server.h"

namespace agentgate::http {

[[nodiscard]] Result<Response> request(const std::filesystem::path& socket,
                                       const std::string& method, const std::string& path,
                                       const std::string& body, std::chrono::milliseconds timeout);

}  // namespace agentgate::http

// SPDX-License-Identifier: GPL-2.0-or-later
//
// One HTTP exchange on a connected socket, with cpp-httplib as the parser. This is the only place
// that knows the library's server side; 0.11.4 (Debian 12) and 0.18.7 (Debian 13) differ in what
// they let a subclass call, and both let more through than the bounds of server.h allow.
#pragma once

#include <functional>
#include <memory>

#include "plugin/http/server.h"

namespace agentgate::http {

class Parser {
 public:
  Parser(const Options& options, Handler handler);
  ~Parser();
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  // Reads one request from `fd`, runs the handler and writes the answer. `request_read` is called
  // once the request is complete, before the handler runs. May be called from many threads.
  // Does not close `fd`. False: no request came.
  bool serve(int fd, const Peer& peer, const std::function<void()>& request_read);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace agentgate::http

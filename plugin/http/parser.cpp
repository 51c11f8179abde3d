// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/http/parser.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace agentgate::http {
namespace {

using Clock = std::chrono::steady_clock;

// The parser's view of the connection: one deadline for the whole request, a budget of bytes.
// httplib's own stream has a timeout per read and no bound on headers (2 MB were accepted).
// Newer versions have more virtual functions; without `override` one class fits all of them.
// NOLINTBEGIN(modernize-use-override)
class BoundedStream : public httplib::Stream {
 public:
  BoundedStream(int fd, const Options& options)
      : fd_(fd),
        budget_(options.header_limit + options.body_limit),
        read_until_(Clock::now() + options.read_timeout),
        write_timeout_(options.write_timeout) {}

  bool is_readable() const { return ready(POLLIN, Clock::now()); }
  bool is_writable() const { return ready(POLLOUT, Clock::now()); }
  bool wait_readable() const { return ready(POLLIN, read_until_); }
  bool wait_writable() const { return ready(POLLOUT, Clock::now() + write_timeout_); }
  time_t duration() const { return 0; }

  // httplib reads header lines byte by byte, hence the buffer.
  ssize_t read(char* out, std::size_t size) {
    if (begin_ == end_) {
      if (budget_ == 0 || !wait_readable()) return -1;
      const ssize_t got =
          ::recv(fd_, buffer_.data(), std::min(buffer_.size(), budget_), MSG_DONTWAIT);
      if (got <= 0) return got;
      begin_ = 0;
      end_ = static_cast<std::size_t>(got);
      budget_ -= end_;
    }
    const std::size_t count = std::min(size, end_ - begin_);
    std::copy_n(buffer_.data() + begin_, count, out);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }

  ssize_t write(const char* data, std::size_t size) {
    if (!wait_writable()) return -1;
    return ::send(fd_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void get_remote_ip_and_port(std::string& /*ip*/, int& /*port*/) const {}
  void get_local_ip_and_port(std::string& /*ip*/, int& /*port*/) const {}
  socket_t socket() const { return fd_; }

  [[nodiscard]] bool heard() const { return end_ != 0; }

 private:
  [[nodiscard]] bool ready(short events, Clock::time_point until) const {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      pollfd entry{fd_, events, 0};
      const int count = ::poll(&entry, 1, static_cast<int>(std::max<long long>(left, 0)));
      if (count > 0) return true;
      if (count == 0 || errno != EINTR) return false;
    }
  }

  int fd_;
  std::array<char, 8192> buffer_{};
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::size_t budget_;
  Clock::time_point read_until_;
  std::chrono::milliseconds write_timeout_;
};
// NOLINTEND(modernize-use-override)

// httplib hands its callbacks nothing about the connection; they run on its thread, though.
struct Exchange {
  Peer peer;
  const std::function<void()>* request_read = nullptr;
  bool announced = false;
};
thread_local Exchange* current = nullptr;

constexpr std::size_t kPathLimit = 256;  // the library matches paths with a recursive std::regex

}  // namespace

struct Parser::Impl : httplib::Server {
  Impl(const http::Options& given, http::Handler to) : options(given), handler(std::move(to)) {
    set_keep_alive_max_count(1);
    set_payload_max_length(options.body_limit);
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      return before_body(request, response);
    });
    Post(".*", [this](const httplib::Request& request, httplib::Response& response) {
      answer(request, response);
    });
    set_error_handler([this](const httplib::Request&, httplib::Response& response) {
      if (response.body.empty()) refuse(response, response.status, "the request cannot be read");
    });
    set_exception_handler(
        [this](const httplib::Request&, httplib::Response& response, const std::exception_ptr&) {
          refuse(response, 500, "internal error");
        });
  }

  void refuse(httplib::Response& response, int status, const std::string& text) const {
    response.status = status;
    response.set_content(options.error_body ? options.error_body(status, text) : text + "\n",
                         options.error_body ? "application/json" : "text/plain");
  }

  // Called with the headers read and the body not yet: what the library would read without a
  // bound, or read wrongly, is answered here.
  HandlerResponse before_body(const httplib::Request& request, httplib::Response& response) {
    const auto refused = [&](int status, const std::string& text) {
      refuse(response, status, text);
      return HandlerResponse::Handled;
    };
    if (request.path.size() > kPathLimit) return refused(414, "the path is too long");
    if (request.has_header("Transfer-Encoding")) {
      return refused(411, "a body in chunks is not accepted; send it with Content-Length");
    }
    if (request.has_header("Content-Encoding")) {
      return refused(415, "a body with Content-Encoding is not accepted; send it as it is");
    }
    if (request.is_multipart_form_data()) {
      return refused(415, "multipart/form-data is not accepted; send the JSON as it is");
    }
    const std::size_t lengths = request.get_header_value_count("Content-Length");
    std::size_t length = 0;
    if (lengths > 1) return refused(400, "more than one Content-Length");
    if (lengths == 1) {
      const std::string text = request.get_header_value("Content-Length");
      if (text.empty() || text.size() > 18 ||
          !std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; })) {
        return refused(400, "Content-Length is not a number");
      }
      length = std::stoull(text);
    }
    if (length > options.body_limit) {
      return refused(413,
                     "the body is larger than " + std::to_string(options.body_limit) + " bytes");
    }
    // 0.11.4 waits for the client to close when a POST says no length.
    if (request.method == "POST" && length > 0) return HandlerResponse::Unhandled;
    answer(request, response);
    return HandlerResponse::Handled;
  }

  void answer(const httplib::Request& from, httplib::Response& to) {
    announce();
    // What the library's own exception handling would do differs between the versions.
    try {
      const Response made = handler(Request{from.method, from.path, from.body, current->peer});
      to.status = made.status;
      to.set_content(made.body, made.content_type);
    } catch (...) {
      refuse(to, 500, "internal error");
    }
  }

  static void announce() {
    if (current->announced) return;
    current->announced = true;
    (*current->request_read)();
  }

  using Setup = const std::function<void(httplib::Request&)>&;
  using Exchange0_11 = bool (httplib::Server::*)(httplib::Stream&, bool, bool&, Setup);
  using Exchange0_18 = bool (httplib::Server::*)(httplib::Stream&, const std::string&, int,
                                                 const std::string&, int, bool, bool&, Setup);
  bool run(Exchange0_11 exchange, httplib::Stream& stream) {
    bool closed = false;
    return (this->*exchange)(stream, true, closed, nullptr);
  }
  bool run(Exchange0_18 exchange, httplib::Stream& stream) {
    bool closed = false;
    return (this->*exchange)(stream, "", 0, "", 0, true, closed, nullptr);
  }
  bool run(httplib::Stream& stream) { return run(&Impl::process_request, stream); }

  http::Options options;
  http::Handler handler;
};

Parser::Parser(const Options& options, Handler handler)
    : impl_(std::make_unique<Impl>(options, std::move(handler))) {}
Parser::~Parser() = default;

bool Parser::serve(int fd, const Peer& peer, const std::function<void()>& request_read) {
  Exchange exchange{peer, &request_read, false};
  current = &exchange;
  BoundedStream stream(fd, impl_->options);
  bool served = false;
  try {
    served = impl_->run(stream);
  } catch (...) {
    served = false;  // out of memory in the parser; the connection ends without an answer
  }
  current = nullptr;
  return served || stream.heard();
}

}  // namespace agentgate::http

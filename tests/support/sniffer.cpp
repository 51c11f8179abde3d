// SPDX-License-Identifier: GPL-2.0-or-later
#include "tests/support/sniffer.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <system_error>

namespace agentgate::test {
namespace {

using namespace std::chrono_literals;

[[noreturn]] void raise(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

void enter(NamespaceFd where) {
  if (where >= 0 && ::setns(where, CLONE_NEWNET) != 0) raise("setns");
}

// A socket belongs to the namespace it was made in, whichever thread uses it later.
template <class Work>
void inside(NamespaceFd where, Work&& work) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      enter(where);
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

ifreq request_for(const std::string& interface) {
  ifreq out{};
  interface.copy(static_cast<char*>(out.ifr_name), IFNAMSIZ - 1);
  return out;
}

// Works through any socket of the namespace. 0 if there is no such link.
int index_of(int socket, const std::string& interface) {
  ifreq request = request_for(interface);
  return ::ioctl(socket, SIOCGIFINDEX, &request) == 0 ? request.ifr_ifindex : 0;
}

std::string name_of(int socket, int index) {
  ifreq request{};
  request.ifr_ifindex = index;
  if (::ioctl(socket, SIOCGIFNAME, &request) != 0) return "#" + std::to_string(index);
  return static_cast<char*>(request.ifr_name);
}

int set_up(int socket, const std::string& interface) {
  ifreq request = request_for(interface);
  if (::ioctl(socket, SIOCGIFFLAGS, &request) != 0) return errno;
  if ((request.ifr_flags & IFF_UP) != 0) return EALREADY;
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP);
  return ::ioctl(socket, SIOCSIFFLAGS, &request) == 0 ? 0 : errno;
}

sockaddr_ll address_of(int index, int protocol) {
  sockaddr_ll out{};
  out.sll_family = AF_PACKET;
  out.sll_protocol = htons(static_cast<std::uint16_t>(protocol));
  out.sll_ifindex = index;
  return out;
}

bool wait_until(const std::function<bool()>& done, std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace

NamespaceFd open_namespace(const std::string& what) {
  std::string path = what;
  if (!what.empty() && what.find_first_not_of("0123456789") == std::string::npos) {
    path = "/proc/" + what + "/ns/net";
  } else if (what.find('/') == std::string::npos) {
    path = "/run/netns/" + what;
  }
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) raise("open " + path);
  return fd;
}

Tally SnifferCounts::marked() const {
  Tally out;
  for (const auto& [kind, tally] : kinds) {
    out.incoming += tally.incoming;
    out.outgoing += tally.outgoing;
  }
  return out;
}

// ---- Sniffer

struct Sniffer::State {
  Options options;
  Recogniser recogniser;
  std::string interface;
  Fd socket;
  Fd wake;
  std::thread thread;
  mutable std::mutex mutex;
  mutable std::condition_variable arrived;
  std::map<int, SnifferCounts> by_index;  // 0: totals and what PACKET_STATISTICS says
  std::map<int, std::string> names;
  std::vector<Seen> frames;

  explicit State(const Options& o) : options(o), recogniser(options.run, options.who) {}

  void open(const std::string& name) {
    interface = name;
    // Without a protocol no frame is queued before the socket is bound to its link.
    socket = Fd(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) raise("AF_PACKET socket");
    const int index = name.empty() ? 0 : index_of(socket.get(), name);
    if (!name.empty() && index == 0) raise("no link " + name);
    const int size = 64 << 20;
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) != 0) {
      raise("SO_RCVBUFFORCE");
    }
    const int on = 1;
    if (::setsockopt(socket.get(), SOL_PACKET, PACKET_AUXDATA, &on, sizeof on) != 0) {
      raise("PACKET_AUXDATA");
    }
    if (options.promiscuous && index != 0) {
      packet_mreq membership{};
      membership.mr_ifindex = index;
      membership.mr_type = PACKET_MR_PROMISC;
      if (::setsockopt(socket.get(), SOL_PACKET, PACKET_ADD_MEMBERSHIP, &membership,
                       sizeof membership) != 0) {
        raise("PACKET_ADD_MEMBERSHIP");
      }
    }
    const sockaddr_ll address = address_of(index, ETH_P_ALL);
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      raise("bind to " + name);
    }
    wake = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake.valid()) raise("eventfd");
  }

  // False when the queue is empty. A link that goes down or away leaves an error in the queue.
  bool read_one() {
    std::array<std::uint8_t, 65536 + 64> buffer;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    alignas(cmsghdr) std::array<char, 256>
        control;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    sockaddr_ll from{};
    iovec part{buffer.data(), buffer.size()};
    msghdr message{};
    message.msg_name = &from;
    message.msg_namelen = sizeof from;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t length = ::recvmsg(socket.get(), &message, 0);
    if (length < 0) return errno != EAGAIN && errno != EBADF;
    Seen seen;
    seen.bytes.assign(buffer.data(), buffer.data() + length);
    seen.outgoing = from.sll_pkttype == PACKET_OUTGOING;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_PACKET || c->cmsg_type != PACKET_AUXDATA) continue;
      tpacket_auxdata aux;
      std::memcpy(&aux, CMSG_DATA(c), sizeof aux);
      if ((aux.tp_status & TP_STATUS_VLAN_VALID) == 0 || seen.bytes.size() < 12) continue;
      const unsigned protocol =
          (aux.tp_status & TP_STATUS_VLAN_TPID_VALID) != 0 ? aux.tp_vlan_tpid : ETH_P_8021Q;
      seen.vlan = aux.tp_vlan_tci;
      const std::array<std::uint8_t, 4> tag = {static_cast<std::uint8_t>(protocol >> 8U),
                                               static_cast<std::uint8_t>(protocol),
                                               static_cast<std::uint8_t>(aux.tp_vlan_tci >> 8U),
                                               static_cast<std::uint8_t>(aux.tp_vlan_tci)};
      seen.bytes.insert(seen.bytes.begin() + 12, tag.begin(), tag.end());
    }
    seen.kind = recogniser.kind_of(seen.bytes);
    const std::lock_guard lock(mutex);
    const auto count = [&](SnifferCounts& counts) {
      ++(seen.outgoing ? counts.all.outgoing : counts.all.incoming);
      if (seen.kind) {
        auto& kind = counts.kinds[*seen.kind];
        ++(seen.outgoing ? kind.outgoing : kind.incoming);
      }
    };
    count(by_index[0]);
    if (interface.empty()) {
      const int index = from.sll_ifindex;
      if (!names.contains(index)) names[index] = name_of(socket.get(), index);
      count(by_index[index]);
    }
    const bool known = seen.kind.has_value();
    if ((known || options.keep_unknown) && frames.size() < options.keep) {
      frames.push_back(std::move(seen));
    }
    if (known) arrived.notify_all();
    return true;
  }

  void read_statistics() {
    tpacket_stats statistics{};
    socklen_t size = sizeof statistics;
    // Reading resets the kernel's counters.
    if (::getsockopt(socket.get(), SOL_PACKET, PACKET_STATISTICS, &statistics, &size) != 0) return;
    const std::lock_guard lock(mutex);
    by_index[0].packets += statistics.tp_packets;
    by_index[0].drops += statistics.tp_drops;
  }

  void loop() {
    std::array<pollfd, 2> polled = {{{socket.get(), POLLIN, 0}, {wake.get(), POLLIN, 0}}};
    while (polled[1].revents == 0) {
      ::poll(polled.data(), polled.size(), 200);
      while (polled[1].revents == 0 && read_one()) {
        if (std::uint64_t one = 0; ::read(wake.get(), &one, sizeof one) == sizeof one) {
          polled[1].revents = POLLIN;
        }
      }
      read_statistics();
    }
    // No more may join the queue, else a sender at full rate would keep this from ending.
    const sockaddr_ll nothing =
        address_of(interface.empty() ? 0 : index_of(socket.get(), interface), ETH_P_LOOPBACK);
    (void)::bind(socket.get(), reinterpret_cast<const sockaddr*>(&nothing), sizeof nothing);
    const auto end = std::chrono::steady_clock::now() + 10s;
    while (read_one() && std::chrono::steady_clock::now() < end) {
    }
    read_statistics();
  }
};

Sniffer::Sniffer(NamespaceFd where, const std::string& interface, Options options)
    : state_(std::make_unique<State>(options)) {
  inside(where, [&] { state_->open(interface); });
  state_->thread = std::thread([state = state_.get()] { state->loop(); });
}

Sniffer::~Sniffer() { stop(); }

void Sniffer::stop() {
  if (!state_->thread.joinable()) return;
  const std::uint64_t one = 1;
  if (::write(state_->wake.get(), &one, sizeof one) != sizeof one) std::terminate();
  state_->thread.join();
  state_->socket.reset();
}

SnifferCounts Sniffer::counts() const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->by_index.find(0);
  return found == state_->by_index.end() ? SnifferCounts{} : found->second;
}

std::map<std::string, SnifferCounts> Sniffer::counts_by_link() const {
  const std::lock_guard lock(state_->mutex);
  std::map<std::string, SnifferCounts> out;
  for (const auto& [index, counts] : state_->by_index) {
    if (index == 0) continue;
    auto& into = out[state_->names.at(index)];
    into.all.incoming += counts.all.incoming;
    into.all.outgoing += counts.all.outgoing;
    for (const auto& [kind, tally] : counts.kinds) {
      into.kinds[kind].incoming += tally.incoming;
      into.kinds[kind].outgoing += tally.outgoing;
    }
  }
  return out;
}

std::vector<Seen> Sniffer::frames() const {
  const std::lock_guard lock(state_->mutex);
  return state_->frames;
}

bool Sniffer::wait_for(std::uint16_t kind, std::chrono::milliseconds timeout) const {
  std::unique_lock lock(state_->mutex);
  return state_->arrived.wait_for(lock, timeout,
                                  [&] { return state_->by_index[0].kinds.contains(kind); });
}

// ---- Sender

Sender::Sender(NamespaceFd where, const std::string& interface, std::uint32_t mark)
    : interface_(interface) {
  inside(where, [&] {
    Fd socket(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0));
    if (!socket.valid()) raise("AF_PACKET socket");
    if (index_of(socket.get(), interface_) == 0) raise("no link " + interface_);
    if (mark != 0 && ::setsockopt(socket.get(), SOL_SOCKET, SO_MARK, &mark, sizeof mark) != 0)
      raise("SO_MARK");
    socket_ = ::dup(socket.get());
  });
  if (socket_ < 0) raise("dup");
}

Sender::~Sender() {
  if (socket_ >= 0) ::close(socket_);
}

int Sender::bring_up() {
  const int result = set_up(socket_, interface_);
  return result == EALREADY ? 0 : result;
}

int Sender::send(const Bytes& frame) {
  if (const int error = bring_up(); error != 0) return error;
  ifreq request = request_for(interface_);
  if (::ioctl(socket_, SIOCGIFMTU, &request) == 0 &&
      static_cast<std::size_t>(request.ifr_mtu) + 14 < frame.size()) {
    request.ifr_mtu = static_cast<int>(frame.size()) - 14;
    if (::ioctl(socket_, SIOCSIFMTU, &request) != 0) return errno;
  }
  const sockaddr_ll to = address_of(index_of(socket_, interface_), 0);
  const ssize_t sent = ::sendto(socket_, frame.data(), frame.size(), 0,
                                reinterpret_cast<const sockaddr*>(&to), sizeof to);
  return sent < 0 ? errno : 0;
}

int Sender::send(const FrameKind& kind, const Identity& who, std::uint64_t run) {
  int first = 0;
  for (const auto& frame : kind.build(who, run)) {
    const int error = send(frame);
    if (first == 0) first = error;
  }
  return first;
}

// ---- Blaster

Blaster::Blaster(NamespaceFd where, std::string interface, std::vector<Bytes> frames)
    : interface_(std::move(interface)), frames_(std::move(frames)) {
  if (frames_.empty()) throw std::system_error(EINVAL, std::generic_category(), "no frames");
  std::exception_ptr error;
  std::atomic<bool> started{false};
  thread_ = std::thread([&, where] {
    try {
      enter(where);
    } catch (...) {
      error = std::current_exception();
    }
    const bool run = !error;
    started = true;
    started.notify_one();
    if (run) loop();
  });
  started.wait(false);
  if (error) {
    thread_.join();
    std::rethrow_exception(error);
  }
}

Blaster::~Blaster() { stop(); }

Blaster::Counts Blaster::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  return counts();
}

Blaster::Counts Blaster::counts() const { return {sent_, refused_, ups_, opened_}; }

bool Blaster::wait_sent(std::uint64_t at_least, std::chrono::milliseconds timeout) const {
  return wait_until([&] { return sent_ >= at_least; }, timeout);
}

void Blaster::loop() {
  constexpr std::size_t kBatch = 64;
  std::array<mmsghdr, kBatch> messages{};
  std::array<iovec, kBatch> parts{};
  std::size_t next = 0;
  while (!stop_) {
    const Fd socket(::socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0));
    const int index = socket.valid() ? index_of(socket.get(), interface_) : 0;
    const sockaddr_ll address = address_of(index, 0);
    if (index == 0 ||
        ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      std::this_thread::sleep_for(50us);
      continue;
    }
    // Straight to the driver: a queueing discipline would hide that the link is down.
    const int on = 1;
    ::setsockopt(socket.get(), SOL_PACKET, PACKET_QDISC_BYPASS, &on, sizeof on);
    ++opened_;
    while (!stop_) {
      for (std::size_t i = 0; i < kBatch; ++i) {
        Bytes& frame = frames_[(next + i) % frames_.size()];
        parts[i] = {frame.data(), frame.size()};
        messages[i] = {};
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
      }
      const int sent = ::sendmmsg(socket.get(), messages.data(), kBatch, 0);
      if (sent > 0) {
        sent_ += static_cast<std::uint64_t>(sent);
        next = (next + static_cast<std::size_t>(sent)) % frames_.size();
        continue;
      }
      const int error = errno;
      ++refused_;
      if (error == ENETDOWN) {
        const int up = set_up(socket.get(), interface_);
        if (up == 0) ++ups_;
        if (up == ENODEV) break;
      } else if (error == ENXIO || error == ENODEV) {
        break;
      } else {
        next = (next + 1) % frames_.size();  // this one is not to be sent, e.g. EMSGSIZE
      }
    }
  }
}

// ---- HostListener

struct HostListener::State {
  struct Raw {
    std::string name;
    Fd socket;
  };
  Recogniser recogniser;
  std::vector<Raw> raw;
  std::vector<Raw> listeners;
  std::vector<Raw> datagrams;
  Fd wake;
  std::thread thread;
  mutable std::mutex mutex;
  Counts counts;

  explicit State(std::uint64_t run) : recogniser(run) {}

  void open(std::uint16_t port) {
    const std::array<std::pair<const char*, int>, 8> protocols = {{{"icmp", IPPROTO_ICMP},
                                                                   {"tcp", IPPROTO_TCP},
                                                                   {"udp", IPPROTO_UDP},
                                                                   {"sctp", IPPROTO_SCTP},
                                                                   {"gre", IPPROTO_GRE},
                                                                   {"ipip", IPPROTO_IPIP},
                                                                   {"igmp", IPPROTO_IGMP},
                                                                   {"253", 253}}};
    for (const int family : {AF_INET, AF_INET6}) {
      const std::string digit = family == AF_INET ? "4" : "6";
      for (const auto& [name, protocol] : protocols) {
        const int number =
            family == AF_INET6 && protocol == IPPROTO_ICMP ? IPPROTO_ICMPV6 : protocol;
        Fd fd(::socket(family, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, number));
        if (!fd.valid()) raise(std::string("raw socket ") + name + digit);
        raw.push_back({name + digit, std::move(fd)});
      }
      for (const int type : {SOCK_STREAM, SOCK_DGRAM}) {
        Fd fd(::socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!fd.valid()) raise("socket");
        const int on = 1;
        ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (family == AF_INET6) {
          ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
        }
        sockaddr_in6 any6{};
        any6.sin6_family = AF_INET6;
        any6.sin6_port = htons(port);
        sockaddr_in any4{};
        any4.sin_family = AF_INET;
        any4.sin_port = htons(port);
        const auto* address = family == AF_INET ? reinterpret_cast<const sockaddr*>(&any4)
                                                : reinterpret_cast<const sockaddr*>(&any6);
        const socklen_t size = family == AF_INET ? sizeof any4 : sizeof any6;
        if (::bind(fd.get(), address, size) != 0) raise("bind");
        if (type == SOCK_STREAM && ::listen(fd.get(), 128) != 0) raise("listen");
        if (type == SOCK_STREAM) {
          listeners.push_back({"accepted" + digit, std::move(fd)});
        } else {
          datagrams.push_back({"datagram" + digit, std::move(fd)});
        }
      }
    }
    wake = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake.valid()) raise("eventfd");
  }

  void drain(const Raw& from, bool recognise) {
    std::array<std::uint8_t, 65536> buffer;       // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (int bound = 0; bound < 1000; ++bound) {  // stop() must get its turn under a flood
      const ssize_t length = ::recv(from.socket.get(), buffer.data(), buffer.size(), 0);
      if (length < 0) return;
      const std::lock_guard lock(mutex);
      ++counts.all[from.name];
      if (!recognise) continue;
      const auto kind =
          recogniser.kind_of(std::span(buffer.data(), static_cast<std::size_t>(length)));
      if (kind) ++counts.kinds[*kind];
    }
  }

  void read_all() {
    for (const auto& one : raw) drain(one, true);
    for (const auto& one : datagrams) drain(one, false);
    for (const auto& one : listeners) {
      for (;;) {
        const Fd client(::accept4(one.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!client.valid()) break;
        const std::lock_guard lock(mutex);
        ++counts.all[one.name];
      }
    }
  }

  void loop() {
    std::vector<pollfd> polled = {{wake.get(), POLLIN, 0}};
    for (const auto* list : {&raw, &listeners, &datagrams}) {
      for (const auto& one : *list) polled.push_back({one.socket.get(), POLLIN, 0});
    }
    while (polled[0].revents == 0) {
      ::poll(polled.data(), polled.size(), -1);
      read_all();
    }
  }
};

HostListener::HostListener(NamespaceFd where, std::uint64_t run, std::uint16_t port)
    : state_(std::make_unique<State>(run)) {
  inside(where, [&] { state_->open(port); });
  state_->thread = std::thread([state = state_.get()] { state->loop(); });
}

HostListener::~HostListener() { stop(); }

void HostListener::stop() {
  if (!state_->thread.joinable()) return;
  const std::uint64_t one = 1;
  if (::write(state_->wake.get(), &one, sizeof one) != sizeof one) std::terminate();
  state_->thread.join();
  state_->raw.clear();
  state_->listeners.clear();
  state_->datagrams.clear();
}

HostListener::Counts HostListener::counts() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counts;
}

}  // namespace agentgate::test

// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/nft_socket.h"

#include <arpa/inet.h>
#include <libmnl/libmnl.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "netdriver/nft_wire.h"

namespace agentgate::netdriver::nft {
namespace {

constexpr int kReceiveBuffer = 4 << 20;
constexpr std::size_t kChunk = 64 * 1024;  // the kernel fills dumps up to 32 KiB a datagram
constexpr int kDumpAttempts = 100;

Bytes batch_edge(std::uint16_t type, std::uint32_t sequence) {
  Bytes bytes(MNL_NLMSG_HDRLEN + sizeof(nfgenmsg));
  auto* header = reinterpret_cast<nlmsghdr*>(bytes.data());
  header->nlmsg_len = static_cast<std::uint32_t>(bytes.size());
  header->nlmsg_type = type;
  header->nlmsg_flags = NLM_F_REQUEST;
  header->nlmsg_seq = sequence;
  auto* generic = reinterpret_cast<nfgenmsg*>(bytes.data() + MNL_NLMSG_HDRLEN);
  generic->nfgen_family = AF_UNSPEC;
  generic->version = NFNETLINK_V0;
  generic->res_id = htons(NFNL_SUBSYS_NFTABLES);
  return bytes;
}

// NLMSG_ERROR to our error: errno, offset and text of the extended acknowledgement (NETLINK_CAP_ACK
// is set, so the attributes follow the header of the request at once).
Error decode_error(const nlmsghdr* header, std::string operation) {
  Error error;
  error.operation = std::move(operation);
  const auto* body = static_cast<const nlmsgerr*>(mnl_nlmsg_get_payload(header));
  error.code = -body->error;
  if ((header->nlmsg_flags & NLM_F_ACK_TLVS) == 0) return error;
  const auto* at = reinterpret_cast<const std::uint8_t*>(body) + MNL_ALIGN(sizeof(nlmsgerr));
  const auto* end = reinterpret_cast<const std::uint8_t*>(header) + header->nlmsg_len;
  while (at + sizeof(nlattr) <= end) {
    const auto* attribute = reinterpret_cast<const nlattr*>(at);
    if (attribute->nla_len < sizeof(nlattr) || at + attribute->nla_len > end) break;
    const std::size_t size = attribute->nla_len - sizeof(nlattr);
    const auto* data = reinterpret_cast<const char*>(at + sizeof(nlattr));
    if (mnl_attr_get_type(attribute) == NLMSGERR_ATTR_MSG) {
      error.text.assign(data, ::strnlen(data, size));
    } else if (mnl_attr_get_type(attribute) == NLMSGERR_ATTR_OFFS && size == 4) {
      std::uint32_t offset = 0;
      std::memcpy(&offset, data, sizeof offset);
      error.offset = offset;
    }
    at += MNL_ALIGN(attribute->nla_len);
  }
  return error;
}

std::string place(Family family) { return std::string(to_string(family)) + " " + kTable; }

}  // namespace

// -- Batch ------------------------------------------------------------------------------------

void Batch::add(Bytes bytes, std::string what) {
  messages_.push_back({std::move(bytes), std::move(what)});
}

void Batch::add_table(Family family, std::uint32_t flags) {
  add(wire::table(NFT_MSG_NEWTABLE, NLM_F_CREATE, family, flags), "add table " + place(family));
}

void Batch::delete_table(Family family) {
  add(wire::table(NFT_MSG_DELTABLE, 0, family, std::nullopt), "delete table " + place(family));
}

void Batch::add_chain(Family family, const std::string& name, const Chain& chain) {
  add(wire::chain(NFT_MSG_NEWCHAIN, NLM_F_CREATE, family, name, &chain),
      "add chain " + place(family) + " " + name);
}

void Batch::delete_chain(Family family, const std::string& name) {
  add(wire::chain(NFT_MSG_DELCHAIN, 0, family, name, nullptr),
      "delete chain " + place(family) + " " + name);
}

void Batch::flush_chain(Family family, const std::string& name) {
  add(wire::rule(NFT_MSG_DELRULE, 0, family, name, nullptr),
      "flush chain " + place(family) + " " + name);
}

void Batch::add_rule(Family family, const std::string& chain, const Rule& rule) {
  add(wire::rule(NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, family, chain, &rule),
      "add rule " + place(family) + " " + chain + " " + to_string(rule));
}

void Batch::add_set(Family family, const std::string& name, const Set& set) {
  add(wire::set(NFT_MSG_NEWSET, NLM_F_CREATE, family, name, &set, next_set_id_++),
      "add set " + place(family) + " " + name);
}

void Batch::delete_set(Family family, const std::string& name) {
  add(wire::set(NFT_MSG_DELSET, 0, family, name, nullptr, 0),
      "delete set " + place(family) + " " + name);
}

void Batch::add_elements(Family family, const std::string& set,
                         const std::vector<Element>& elements) {
  for (std::size_t i = 0; i < elements.size(); i += wire::kElementsPerMessage) {
    const std::size_t count = std::min(wire::kElementsPerMessage, elements.size() - i);
    add(wire::elements(NFT_MSG_NEWSETELEM, NLM_F_CREATE, family, set, elements.data() + i,
                       elements.data() + i + count),
        "add elements " + place(family) + " " + set);
  }
}

void Batch::delete_elements(Family family, const std::string& set,
                            const std::vector<Element>& elements) {
  for (std::size_t i = 0; i < elements.size(); i += wire::kElementsPerMessage) {
    const std::size_t count = std::min(wire::kElementsPerMessage, elements.size() - i);
    add(wire::elements(NFT_MSG_DELSETELEM, 0, family, set, elements.data() + i,
                       elements.data() + i + count),
        "delete elements " + place(family) + " " + set);
  }
}

void Batch::add_whole(Family family, const std::string& name, const Chain& chain) {
  add_chain(family, name, chain);
  for (const Rule& rule : chain.rules) add_rule(family, name, rule);
}

void Batch::add_whole(Family family, const std::string& name, const Set& set) {
  add_set(family, name, set);
  add_elements(family, name, set.elements);
}

// -- NftSocket --------------------------------------------------------------------------------

Result<std::unique_ptr<NftSocket>> NftSocket::open() {
  const int fd = ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
  if (fd < 0) return fail_errno("open nfnetlink socket");
  std::unique_ptr<NftSocket> out(new NftSocket(fd));
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
    return fail_errno("bind nfnetlink socket");
  }
  const int on = 1;
  if (::setsockopt(fd, SOL_NETLINK, NETLINK_EXT_ACK, &on, sizeof on) < 0 ||
      ::setsockopt(fd, SOL_NETLINK, NETLINK_CAP_ACK, &on, sizeof on) < 0) {
    return fail_errno("set up nfnetlink socket");
  }
  const int size = kReceiveBuffer;
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
  const timeval patience{10, 0};  // the kernel answers while we ask; this is only against hanging
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  return out;
}

NftSocket::~NftSocket() { ::close(fd_); }

Status NftSocket::commit(const Batch& batch, const std::string& operation) {
  return send(batch, true, operation);
}

Status NftSocket::dry_run(const Batch& batch, const std::string& operation) {
  return send(batch, false, operation);
}

Status NftSocket::send(const Batch& batch, bool with_end, const std::string& operation) {
  if (batch.empty()) return {};
  const std::uint32_t first = ++sequence_;
  Bytes wire = batch_edge(NFNL_MSG_BATCH_BEGIN, first);
  for (const auto& message : batch.messages_) {
    const std::size_t at = wire.size();
    wire.insert(wire.end(), message.bytes.begin(), message.bytes.end());
    wire.resize(MNL_ALIGN(wire.size()));
    reinterpret_cast<nlmsghdr*>(wire.data() + at)->nlmsg_seq = ++sequence_;
  }
  if (with_end) {
    const Bytes end = batch_edge(NFNL_MSG_BATCH_END, ++sequence_);
    wire.insert(wire.end(), end.begin(), end.end());
  }

  const int size = static_cast<int>(wire.size() + kChunk);
  (void)::setsockopt(fd_, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  ssize_t sent = 0;
  do {
    sent = ::sendto(fd_, wire.data(), wire.size(), 0, reinterpret_cast<sockaddr*>(&kernel),
                    sizeof kernel);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return fail_errno(operation, "send batch");

  // nfnetlink works while we are in sendto(): all errors are queued by now, and no error with a
  // number of ours means that the batch is committed. An ACK of a single message means nothing:
  // the good messages of an aborted batch get one too.
  Status outcome;
  Bytes buffer(kChunk);
  for (;;) {
    const ssize_t length = ::recv(fd_, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (length < 0) return fail_errno(operation, "outcome of the batch is not known, read it back");
    int left = static_cast<int>(length);
    for (const auto* header = reinterpret_cast<const nlmsghdr*>(buffer.data());
         mnl_nlmsg_ok(header, left); header = mnl_nlmsg_next(header, &left)) {
      if (header->nlmsg_type != NLMSG_ERROR || header->nlmsg_seq - first > sequence_ - first) {
        continue;
      }
      if (mnl_nlmsg_get_payload_len(header) < sizeof(nlmsgerr)) continue;
      Error error = decode_error(header, operation);
      if (error.code == 0 || !outcome) continue;
      const std::uint32_t index = header->nlmsg_seq - first;  // 0 is the batch itself
      const std::string what = index == 0 || index > batch.messages_.size()
                                   ? "the batch as a whole"
                                   : batch.messages_[index - 1].what;
      error.text = what + (error.text.empty() ? "" : ": " + error.text);
      outcome = tl::unexpected(std::move(error));
    }
  }
  return outcome;
}

// Sends one request and hands every answer to parse(header), which returns false for a message
// that it cannot read. A dump that other writers interrupted is done again from the start: the
// caller's parse is told so with a null header.
template <class Parse>
Status NftSocket::request(Bytes message, bool dump, const std::string& operation,
                          const Parse& parse) {
  for (int attempt = 0; attempt < kDumpAttempts; ++attempt) {
    parse(nullptr);
    auto* header = reinterpret_cast<nlmsghdr*>(message.data());
    const std::uint32_t sequence = ++sequence_;
    header->nlmsg_seq = sequence;
    sockaddr_nl kernel{};
    kernel.nl_family = AF_NETLINK;
    ssize_t sent = 0;
    do {
      sent = ::sendto(fd_, message.data(), message.size(), 0,
                      reinterpret_cast<sockaddr*>(&kernel), sizeof kernel);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0) return fail_errno(operation, "send");

    bool interrupted = false;
    bool done = false;
    Bytes buffer(kChunk);
    while (!done) {
      const ssize_t length = ::recv(fd_, buffer.data(), buffer.size(), 0);
      if (length < 0 && errno == EINTR) continue;
      if (length < 0 && errno == ENOBUFS) {
        interrupted = true;
        continue;  // what was lost is asked for again; the rest of this dump still ends in DONE
      }
      if (length < 0) return fail_errno(operation, "receive");
      int left = static_cast<int>(length);
      for (const auto* answer = reinterpret_cast<const nlmsghdr*>(buffer.data());
           mnl_nlmsg_ok(answer, left); answer = mnl_nlmsg_next(answer, &left)) {
        if (answer->nlmsg_seq != sequence) continue;
        if ((answer->nlmsg_flags & NLM_F_DUMP_INTR) != 0) interrupted = true;
        if (answer->nlmsg_type == NLMSG_DONE) {
          done = true;
        } else if (answer->nlmsg_type == NLMSG_ERROR) {
          if (mnl_nlmsg_get_payload_len(answer) < sizeof(nlmsgerr)) continue;
          Error error = decode_error(answer, operation);
          if (error.code != 0) return tl::unexpected(std::move(error));
          done = true;
        } else if (!parse(answer)) {
          return fail(operation, "the kernel's answer does not parse", EBADMSG);
        } else if (!dump) {
          done = true;
        }
      }
    }
    if (!interrupted) return {};
  }
  return fail(operation, "other writers interrupt every dump", EINTR);
}

Result<std::optional<std::uint32_t>> NftSocket::table_flags(Family family) {
  std::optional<std::uint32_t> out;
  const Status status =
      request(wire::table(NFT_MSG_GETTABLE, 0, family, std::nullopt), false,
              "read table " + place(family), [&](const nlmsghdr* header) {
                if (header == nullptr) return true;
                const auto table = wire::parse_table(header);
                if (!table) return false;
                out = table->second;
                return true;
              });
  if (!status && status.error().code == ENOENT) return std::optional<std::uint32_t>();
  if (!status) return tl::unexpected(status.error());
  return out;
}

Result<std::map<std::string, Chain>> NftSocket::read_chains(Family family) {
  std::map<std::string, Chain> out;
  // The kernel has no table filter for chains: all of the family come.
  const Status status =
      request(wire::chain(NFT_MSG_GETCHAIN, NLM_F_DUMP, family, "", nullptr), true,
              "read chains of " + place(family), [&](const nlmsghdr* header) {
                if (header == nullptr) {
                  out.clear();
                  return true;
                }
                auto chain = wire::parse_chain(header);
                if (!chain) return false;
                if (chain->table == kTable) out[chain->name] = std::move(chain->chain);
                return true;
              });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Status NftSocket::read_rules(Family family, const std::string* chain,
                             std::map<std::string, Chain>& chains) {
  return request(wire::rule(NFT_MSG_GETRULE, NLM_F_DUMP, family,
                            chain == nullptr ? std::string() : *chain, nullptr),
                 true, "read rules of " + place(family), [&](const nlmsghdr* header) {
                   if (header == nullptr) {
                     for (auto& [name, value] : chains) value.rules.clear();
                     return true;
                   }
                   auto rule = wire::parse_rule(header);
                   if (!rule) return false;
                   const auto target = chains.find(rule->chain);
                   if (rule->table == kTable && target != chains.end()) {
                     target->second.rules.push_back(std::move(rule->rule));
                   }
                   return true;
                 });
}

Status NftSocket::read_elements(Family family, const std::string& name, Set& set) {
  Status status = request(
      wire::elements(NFT_MSG_GETSETELEM, NLM_F_DUMP, family, name, nullptr, nullptr), true,
      "read elements of " + place(family) + " " + name, [&](const nlmsghdr* header) {
        if (header == nullptr) {
          set.elements.clear();
          return true;
        }
        auto elements = wire::parse_elements(header);
        if (!elements) return false;
        set.elements.insert(set.elements.end(), elements->begin(), elements->end());
        return true;
      });
  std::sort(set.elements.begin(), set.elements.end());
  return status;
}

Result<std::optional<Table>> NftSocket::read_table(Family family) {
  const auto flags = table_flags(family);
  if (!flags) return tl::unexpected(flags.error());
  if (!*flags) return std::optional<Table>();
  Table table;
  table.flags = **flags;
  auto chains = read_chains(family);
  if (!chains) return tl::unexpected(chains.error());
  table.chains = std::move(*chains);
  if (const Status rules = read_rules(family, nullptr, table.chains); !rules) {
    return tl::unexpected(rules.error());
  }
  const Status sets =
      request(wire::set(NFT_MSG_GETSET, NLM_F_DUMP, family, "", nullptr, 0), true,
              "read sets of " + place(family), [&](const nlmsghdr* header) {
                if (header == nullptr) {
                  table.sets.clear();
                  return true;
                }
                auto set = wire::parse_set(header);
                if (!set) return false;
                if (set->table == kTable) table.sets[set->name] = std::move(set->set);
                return true;
              });
  if (!sets) return tl::unexpected(sets.error());
  for (auto& [name, set] : table.sets) {
    if (const Status elements = read_elements(family, name, set); !elements) {
      return tl::unexpected(elements.error());
    }
  }
  return std::optional<Table>(std::move(table));
}

Result<std::optional<Chain>> NftSocket::read_chain(Family family, const std::string& name) {
  std::map<std::string, Chain> chains;
  const Status status =
      request(wire::chain(NFT_MSG_GETCHAIN, 0, family, name, nullptr), false,
              "read chain " + place(family) + " " + name, [&](const nlmsghdr* header) {
                if (header == nullptr) return true;
                auto chain = wire::parse_chain(header);
                if (!chain) return false;
                chains[chain->name] = std::move(chain->chain);
                return true;
              });
  if (!status && status.error().code == ENOENT) return std::optional<Chain>();
  if (!status) return tl::unexpected(status.error());
  if (const Status rules = read_rules(family, &name, chains); !rules) {
    return tl::unexpected(rules.error());
  }
  return std::optional<Chain>(std::move(chains[name]));
}

Result<std::optional<Set>> NftSocket::read_set(Family family, const std::string& name) {
  std::optional<Set> out;
  const Status status =
      request(wire::set(NFT_MSG_GETSET, 0, family, name, nullptr, 0), false,
              "read set " + place(family) + " " + name, [&](const nlmsghdr* header) {
                if (header == nullptr) return true;
                auto set = wire::parse_set(header);
                if (!set) return false;
                out = std::move(set->set);
                return true;
              });
  if (!status && status.error().code == ENOENT) return std::optional<Set>();
  if (!status) return tl::unexpected(status.error());
  if (!out) return out;
  if (const Status elements = read_elements(family, name, *out); !elements) {
    return tl::unexpected(elements.error());
  }
  return out;
}

Result<std::optional<Element>> NftSocket::find_element(Family family, const std::string& set,
                                                       const Bytes& key) {
  std::optional<Element> out;
  Element wanted;
  wanted.key = key;
  const Status status =
      request(wire::elements(NFT_MSG_GETSETELEM, 0, family, set, &wanted, &wanted + 1), false,
              "look up element of " + place(family) + " " + set, [&](const nlmsghdr* header) {
                if (header == nullptr) return true;
                const auto elements = wire::parse_elements(header);
                if (!elements) return false;
                if (!elements->empty()) out = elements->front();
                return true;
              });
  if (!status && status.error().code == ENOENT) return std::optional<Element>();
  if (!status) return tl::unexpected(status.error());
  return out;
}

}  // namespace agentgate::netdriver::nft

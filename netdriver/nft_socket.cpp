// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/nft_socket.h"

#include <arpa/inet.h>
#include <libmnl/libmnl.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "netdriver/nft_wire.h"
#include "netdriver/rtnl_wire.h"

namespace agentgate::netdriver::nft {
namespace {

constexpr std::size_t kChunk = 64UL * 1024;

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
  auto socket = NetlinkSocket::open(NETLINK_NETFILTER);
  if (!socket) return tl::unexpected(socket.error());
  return std::unique_ptr<NftSocket>(new NftSocket(std::move(*socket)));
}

NftSocket::NftSocket(NetlinkSocket socket) : socket_(std::move(socket)) {}
NftSocket::~NftSocket() = default;

Status NftSocket::commit(const Batch& batch, const std::string& operation) {
  return send(batch, true, operation);
}

Status NftSocket::dry_run(const Batch& batch, const std::string& operation) {
  return send(batch, false, operation);
}

Status NftSocket::send(const Batch& batch, bool with_end, const std::string& operation) {
  if (batch.empty()) return {};
  std::vector<std::uint32_t> sequences = {socket_.next_sequence()};
  Bytes wire = batch_edge(NFNL_MSG_BATCH_BEGIN, sequences.front());
  for (const auto& message : batch.messages_) {
    const std::size_t at = wire.size();
    wire.insert(wire.end(), message.bytes.begin(), message.bytes.end());
    wire.resize(MNL_ALIGN(wire.size()));
    sequences.push_back(socket_.next_sequence());
    reinterpret_cast<nlmsghdr*>(wire.data() + at)->nlmsg_seq = sequences.back();
  }
  if (with_end) {
    sequences.push_back(socket_.next_sequence());
    const Bytes end = batch_edge(NFNL_MSG_BATCH_END, sequences.back());
    wire.insert(wire.end(), end.begin(), end.end());
  }
  // A batch is one datagram, and has to fit. Outside the first user namespace FORCE is refused.
  const int size = static_cast<int>(wire.size() + kChunk);
  (void)::setsockopt(socket_.fd(), SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size);
  if (Status sent = socket_.send(std::as_bytes(std::span(wire)), operation); !sent) return sent;

  // nfnetlink works while we are in send(): all errors are queued by now, and no error with a
  // number of ours means that the batch is committed. An ACK of a single message means nothing:
  // the good messages of an aborted batch get one too.
  Status outcome;
  Bytes buffer(kChunk);
  for (;;) {
    const auto length = socket_.receive(std::as_writable_bytes(std::span(buffer)),
                                        NetlinkSocket::Clock::now(), operation);
    if (!length && length.error().code == ETIMEDOUT) return outcome;
    if (!length) {
      Error error = length.error();
      error.text = "the outcome of the batch is not known, read it back; " + error.text;
      return tl::unexpected(std::move(error));
    }
    int left = static_cast<int>(*length);
    for (const auto* header = reinterpret_cast<const nlmsghdr*>(buffer.data());
         mnl_nlmsg_ok(header, left); header = mnl_nlmsg_next(header, &left)) {
      const auto at = std::find(sequences.begin(), sequences.end(), header->nlmsg_seq);
      if (header->nlmsg_type != NLMSG_ERROR || at == sequences.end()) continue;
      Error error = netdriver::wire::parse_error(header, operation);
      if (error.code == 0 || !outcome) continue;
      const auto index = static_cast<std::size_t>(at - sequences.begin());
      const std::string what = index == 0 || index > batch.messages_.size()
                                   ? "the batch as a whole"
                                   : batch.messages_[index - 1].what;
      error.text = what + (error.text.empty() ? "" : ": " + error.text);
      outcome = tl::unexpected(std::move(error));
    }
  }
}

// Sends one request and hands every answer to parse(header), which returns false for a message
// that it cannot read. Before every attempt (an interrupted dump is done again from the start)
// parse(nullptr) forgets what the last one brought.
template <class Parse>
Status NftSocket::request(Bytes message, const std::string& operation, const Parse& parse) {
  bool readable = true;
  Status status = socket_.request(
      reinterpret_cast<nlmsghdr*>(message.data()), operation,
      [&](const nlmsghdr* answer) { readable = readable && parse(answer); },
      [&] {
        readable = true;
        parse(nullptr);
      });
  if (status && !readable) return fail(operation, "the kernel's answer does not parse", EBADMSG);
  return status;
}

Result<std::optional<std::uint32_t>> NftSocket::table_flags(Family family) {
  std::optional<std::uint32_t> out;
  const Status status = request(wire::table(NFT_MSG_GETTABLE, 0, family, std::nullopt),
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
  const Status status = request(wire::chain(NFT_MSG_GETCHAIN, NLM_F_DUMP, family, "", nullptr),
                                "read chains of " + place(family), [&](const nlmsghdr* header) {
                                  if (header == nullptr) {
                                    out.clear();
                                    return true;
                                  }
                                  auto chain = wire::parse_chain(header);
                                  if (!chain) return false;
                                  if (chain->table == kTable)
                                    out[chain->name] = std::move(chain->chain);
                                  return true;
                                });
  if (!status) return tl::unexpected(status.error());
  return out;
}

Status NftSocket::read_rules(Family family, const std::string* chain,
                             std::map<std::string, Chain>& chains) {
  return request(wire::rule(NFT_MSG_GETRULE, NLM_F_DUMP, family,
                            chain == nullptr ? std::string() : *chain, nullptr),
                 "read rules of " + place(family), [&](const nlmsghdr* header) {
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
  Status status =
      request(wire::elements(NFT_MSG_GETSETELEM, NLM_F_DUMP, family, name, nullptr, nullptr),
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
  const Status sets = request(wire::set(NFT_MSG_GETSET, NLM_F_DUMP, family, "", nullptr, 0),
                              "read sets of " + place(family), [&](const nlmsghdr* header) {
                                if (header == nullptr) {
                                  table.sets.clear();
                                  return true;
                                }
                                auto set = wire::parse_set(header);
                                if (!set) return false;
                                if (set->table == kTable)
                                  table.sets[set->name] = std::move(set->set);
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
      request(wire::chain(NFT_MSG_GETCHAIN, 0, family, name, nullptr),
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
      request(wire::set(NFT_MSG_GETSET, 0, family, name, nullptr, 0),
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
      request(wire::elements(NFT_MSG_GETSETELEM, 0, family, set, &wanted, &wanted + 1),
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

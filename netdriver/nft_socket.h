// SPDX-License-Identifier: GPL-2.0-or-later
//
// nftables over netlink: batches out, dumps in. Only tables called kTable are ever touched.
//
// A batch is one transaction of the kernel: all of it or nothing. Threading: one thread at a
// time; a table with the owner flag belongs to the socket that made it, so there is one NftSocket
// for all writing. The socket stays in the network namespace it was opened in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "netdriver/error.h"
#include "netdriver/netlink_socket.h"
#include "netdriver/nft.h"

namespace agentgate::netdriver::nft {

// Messages of one transaction, in order. Names may refer to what earlier messages create.
class Batch {
 public:
  void add_table(Family family, std::uint32_t flags);
  void delete_table(Family family);
  // Creates the chain; its rules are added with add_rule.
  void add_chain(Family family, const std::string& name, const Chain& chain);
  // Fails with EBUSY while a rule or element goes to it.
  void delete_chain(Family family, const std::string& name);
  void flush_chain(Family family, const std::string& name);
  void add_rule(Family family, const std::string& chain, const Rule& rule);
  void add_set(Family family, const std::string& name, const Set& set);  // without elements
  void delete_set(Family family, const std::string& name);
  // An element that is there already with the same data is no error.
  void add_elements(Family family, const std::string& set, const std::vector<Element>& elements);
  // ENOENT when one is not there.
  void delete_elements(Family family, const std::string& set, const std::vector<Element>& elements);

  // A chain with its rules; a set with its elements.
  void add_whole(Family family, const std::string& name, const Chain& chain);
  void add_whole(Family family, const std::string& name, const Set& set);

  [[nodiscard]] bool empty() const { return messages_.empty(); }

 private:
  friend class NftSocket;
  struct Message {
    Bytes bytes;       // nlmsghdr and all, sequence number left 0
    std::string what;  // for the error
  };
  void add(Bytes bytes, std::string what);
  std::vector<Message> messages_;
  std::uint32_t next_set_id_ = 1;
};

class NftSocket {
 public:
  static Result<std::unique_ptr<NftSocket>> open();
  ~NftSocket();
  NftSocket(const NftSocket&) = delete;
  NftSocket& operator=(const NftSocket&) = delete;

  // Sends the batch and collects its errors; the first one is returned, its operation naming
  // `operation` and the message that the kernel refused. ENOBUFS: the outcome is not known and
  // must be read back. An empty batch does nothing.
  Status commit(const Batch& batch, const std::string& operation);

  // Has the kernel validate the batch without applying it: it is sent without its end, which
  // nfnetlink takes as an abort. For finding out what a kernel supports.
  Status dry_run(const Batch& batch, const std::string& operation);

  // The port id that the kernel's notifications of our batches carry.
  [[nodiscard]] std::uint32_t portid() const { return socket_.portid(); }

  // Flags of the table; nothing when there is none.
  Result<std::optional<std::uint32_t>> table_flags(Family family);
  // The whole table with chains, rules, sets and elements; nothing when there is none.
  Result<std::optional<Table>> read_table(Family family);
  Result<std::optional<Chain>> read_chain(Family family, const std::string& name);
  Result<std::optional<Set>> read_set(Family family, const std::string& name);
  // The element of that key; nothing when there is none. Not for interval sets.
  Result<std::optional<Element>> find_element(Family family, const std::string& set,
                                              const Bytes& key);

 private:
  explicit NftSocket(NetlinkSocket socket);
  Status send(const Batch& batch, bool end, const std::string& operation);
  template <class Parse>
  Status request(Bytes message, const std::string& operation, const Parse& parse);
  Result<std::map<std::string, Chain>> read_chains(Family family);
  Status read_rules(Family family, const std::string* chain, std::map<std::string, Chain>& chains);
  Status read_elements(Family family, const std::string& name, Set& set);

  NetlinkSocket socket_;
};

}  // namespace agentgate::netdriver::nft

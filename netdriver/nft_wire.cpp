// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/nft_wire.h"

#include <libmnl/libmnl.h>
#include <libnftnl/chain.h>
#include <libnftnl/common.h>
#include <libnftnl/expr.h>
#include <libnftnl/rule.h>
#include <libnftnl/set.h>
#include <libnftnl/table.h>
#include <libnftnl/udata.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>

#include <cstring>
#include <memory>

namespace agentgate::netdriver::nft::wire {
namespace {

template <auto Free>
struct Deleter {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using TablePtr = std::unique_ptr<nftnl_table, Deleter<nftnl_table_free>>;
using ChainPtr = std::unique_ptr<nftnl_chain, Deleter<nftnl_chain_free>>;
using RulePtr = std::unique_ptr<nftnl_rule, Deleter<nftnl_rule_free>>;
using SetPtr = std::unique_ptr<nftnl_set, Deleter<nftnl_set_free>>;
using UdataPtr = std::unique_ptr<nftnl_udata_buf, Deleter<nftnl_udata_buf_free>>;

constexpr std::size_t kMaxComment = 120;  // nft refuses to list more than 128
constexpr std::size_t kMessageSize = 128 * 1024;

// The kernel shows a register at a 16-byte boundary by its old number (nft_dump_register).
std::uint32_t to_wire(std::uint32_t reg) { return NFT_REG32_00 + reg; }
std::uint32_t from_wire(std::uint32_t reg) {
  return reg >= NFT_REG_1 && reg <= NFT_REG_4 ? (reg - NFT_REG_1) * 4 : reg - NFT_REG32_00;
}

template <class Build>
Bytes message(std::uint16_t type, std::uint16_t flags, Family family, const Build& build) {
  Bytes buffer(kMessageSize);
  nlmsghdr* header = nftnl_nlmsg_build_hdr(reinterpret_cast<char*>(buffer.data()), type,
                                           static_cast<std::uint16_t>(family), flags, /*seq=*/0);
  build(header);
  buffer.resize(header->nlmsg_len);
  buffer.shrink_to_fit();
  return buffer;
}

Bytes comment_data(std::uint8_t type, const std::string& comment) {
  const UdataPtr buffer(nftnl_udata_buf_alloc(NFT_USERDATA_MAXLEN));
  if (!buffer ||
      nftnl_udata_put_strz(buffer.get(), type, comment.substr(0, kMaxComment).c_str()) == 0) {
    return {};
  }
  const auto* data = static_cast<const std::uint8_t*>(nftnl_udata_buf_data(buffer.get()));
  return Bytes(data, data + nftnl_udata_buf_len(buffer.get()));
}

// Userdata is type, length, value; what another program wrote there is read with care.
std::string comment_of(const void* data, std::uint32_t length, std::uint8_t type) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  for (std::uint32_t at = 0; bytes != nullptr && at + 2 <= length;) {
    const std::uint32_t size = bytes[at + 1];
    if (at + 2 + size > length) break;
    if (bytes[at] == type) {
      const auto* text = reinterpret_cast<const char*>(bytes + at + 2);
      return std::string(text, ::strnlen(text, size));
    }
    at += 2 + size;
  }
  return {};
}

struct Encoder {
  nftnl_rule* rule;

  [[nodiscard]] nftnl_expr* make(const char* name) const {
    nftnl_expr* expr = nftnl_expr_alloc(name);
    if (expr != nullptr) nftnl_rule_add_expr(rule, expr);
    return expr;
  }
  void operator()(const Payload& e) const {
    nftnl_expr* expr = make("payload");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_PAYLOAD_BASE, e.base);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_PAYLOAD_OFFSET, e.offset);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_PAYLOAD_LEN, e.length);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_PAYLOAD_DREG, to_wire(e.reg));
  }
  void operator()(const Meta& e) const {
    nftnl_expr* expr = make("meta");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_META_KEY, e.key);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_META_DREG, to_wire(e.reg));
  }
  void operator()(const MetaSet& e) const {
    nftnl_expr* expr = make("meta");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_META_KEY, e.key);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_META_SREG, to_wire(e.reg));
  }
  void operator()(const Ct& e) const {
    nftnl_expr* expr = make("ct");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_CT_KEY, e.key);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_CT_DREG, to_wire(e.reg));
  }
  void operator()(const Cmp& e) const {
    nftnl_expr* expr = make("cmp");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_CMP_OP, e.op);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_CMP_SREG, to_wire(e.reg));
    nftnl_expr_set(expr, NFTNL_EXPR_CMP_DATA, e.data.data(),
                   static_cast<std::uint32_t>(e.data.size()));
  }
  void operator()(const Bitwise& e) const {
    nftnl_expr* expr = make("bitwise");
    const auto size = static_cast<std::uint32_t>(e.mask.size());
    nftnl_expr_set_u32(expr, NFTNL_EXPR_BITWISE_SREG, to_wire(e.reg));
    nftnl_expr_set_u32(expr, NFTNL_EXPR_BITWISE_DREG, to_wire(e.reg));
    nftnl_expr_set_u32(expr, NFTNL_EXPR_BITWISE_LEN, size);
    nftnl_expr_set(expr, NFTNL_EXPR_BITWISE_MASK, e.mask.data(), size);
    nftnl_expr_set(expr, NFTNL_EXPR_BITWISE_XOR, e.value.data(), size);
  }
  void operator()(const Lookup& e) const {
    nftnl_expr* expr = make("lookup");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_LOOKUP_SREG, to_wire(e.reg));
    nftnl_expr_set_str(expr, NFTNL_EXPR_LOOKUP_SET, e.set.c_str());
    if (e.verdict_map) nftnl_expr_set_u32(expr, NFTNL_EXPR_LOOKUP_DREG, NFT_REG_VERDICT);
  }
  void operator()(const Verdict& e) const {
    nftnl_expr* expr = make("immediate");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_IMM_DREG, NFT_REG_VERDICT);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_IMM_VERDICT, static_cast<std::uint32_t>(e.code));
    if (!e.chain.empty()) nftnl_expr_set_str(expr, NFTNL_EXPR_IMM_CHAIN, e.chain.c_str());
  }
  void operator()(const Counter& /*e*/) const { (void)make("counter"); }
  void operator()(const Limit& e) const {
    nftnl_expr* expr = make("limit");
    nftnl_expr_set_u64(expr, NFTNL_EXPR_LIMIT_RATE, e.rate);
    nftnl_expr_set_u64(expr, NFTNL_EXPR_LIMIT_UNIT, e.unit);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_LIMIT_BURST, e.burst);
    nftnl_expr_set_u32(expr, NFTNL_EXPR_LIMIT_TYPE, NFT_LIMIT_PKTS);
  }
  void operator()(const Log& e) const {
    nftnl_expr* expr = make("log");
    nftnl_expr_set_u16(expr, NFTNL_EXPR_LOG_GROUP, e.group);
    nftnl_expr_set_str(expr, NFTNL_EXPR_LOG_PREFIX, e.prefix.c_str());
  }
  void operator()(const Masquerade& /*e*/) const { (void)make("masq"); }
  void operator()(const Reject& e) const {
    nftnl_expr* expr = make("reject");
    nftnl_expr_set_u32(expr, NFTNL_EXPR_REJECT_TYPE, e.type);
    nftnl_expr_set_u8(expr, NFTNL_EXPR_REJECT_CODE, e.code);
  }
  void operator()(const Unknown& /*e*/) const {}  // read back only, never sent
};

Bytes expr_bytes(const nftnl_expr* expr, std::uint16_t attribute) {
  std::uint32_t length = 0;
  const auto* data = static_cast<const std::uint8_t*>(nftnl_expr_get(expr, attribute, &length));
  return data == nullptr ? Bytes{} : Bytes(data, data + length);
}

std::string text_of(const char* text) { return text == nullptr ? std::string() : text; }

Expression decode(const nftnl_expr* e) {
  const std::string name = text_of(nftnl_expr_get_str(e, NFTNL_EXPR_NAME));
  const auto has = [&](std::uint16_t attribute) { return nftnl_expr_is_set(e, attribute); };
  const auto u32 = [&](std::uint16_t attribute) { return nftnl_expr_get_u32(e, attribute); };
  if (name == "payload" && has(NFTNL_EXPR_PAYLOAD_DREG)) {
    return Payload{u32(NFTNL_EXPR_PAYLOAD_BASE), u32(NFTNL_EXPR_PAYLOAD_OFFSET),
                   u32(NFTNL_EXPR_PAYLOAD_LEN), from_wire(u32(NFTNL_EXPR_PAYLOAD_DREG))};
  }
  if (name == "meta" && has(NFTNL_EXPR_META_DREG)) {
    return Meta{u32(NFTNL_EXPR_META_KEY), from_wire(u32(NFTNL_EXPR_META_DREG))};
  }
  if (name == "meta" && has(NFTNL_EXPR_META_SREG)) {
    return MetaSet{u32(NFTNL_EXPR_META_KEY), from_wire(u32(NFTNL_EXPR_META_SREG))};
  }
  if (name == "ct" && has(NFTNL_EXPR_CT_DREG) && !has(NFTNL_EXPR_CT_DIR)) {
    return Ct{u32(NFTNL_EXPR_CT_KEY), from_wire(u32(NFTNL_EXPR_CT_DREG))};
  }
  if (name == "cmp") {
    return Cmp{u32(NFTNL_EXPR_CMP_OP), from_wire(u32(NFTNL_EXPR_CMP_SREG)),
               expr_bytes(e, NFTNL_EXPR_CMP_DATA)};
  }
  if (name == "bitwise" && u32(NFTNL_EXPR_BITWISE_SREG) == u32(NFTNL_EXPR_BITWISE_DREG) &&
      u32(NFTNL_EXPR_BITWISE_OP) == NFT_BITWISE_BOOL) {
    return Bitwise{from_wire(u32(NFTNL_EXPR_BITWISE_SREG)), expr_bytes(e, NFTNL_EXPR_BITWISE_MASK),
                   expr_bytes(e, NFTNL_EXPR_BITWISE_XOR)};
  }
  if (name == "lookup" && u32(NFTNL_EXPR_LOOKUP_FLAGS) == 0) {
    return Lookup{text_of(nftnl_expr_get_str(e, NFTNL_EXPR_LOOKUP_SET)),
                  from_wire(u32(NFTNL_EXPR_LOOKUP_SREG)), has(NFTNL_EXPR_LOOKUP_DREG)};
  }
  if (name == "immediate" && u32(NFTNL_EXPR_IMM_DREG) == NFT_REG_VERDICT) {
    return Verdict{static_cast<std::int32_t>(u32(NFTNL_EXPR_IMM_VERDICT)),
                   text_of(nftnl_expr_get_str(e, NFTNL_EXPR_IMM_CHAIN))};
  }
  if (name == "counter") return Counter{};
  if (name == "limit" && u32(NFTNL_EXPR_LIMIT_TYPE) == NFT_LIMIT_PKTS &&
      u32(NFTNL_EXPR_LIMIT_FLAGS) == 0) {
    return Limit{nftnl_expr_get_u64(e, NFTNL_EXPR_LIMIT_RATE),
                 nftnl_expr_get_u64(e, NFTNL_EXPR_LIMIT_UNIT), u32(NFTNL_EXPR_LIMIT_BURST)};
  }
  if (name == "log" && has(NFTNL_EXPR_LOG_GROUP)) {
    return Log{nftnl_expr_get_u16(e, NFTNL_EXPR_LOG_GROUP),
               text_of(nftnl_expr_get_str(e, NFTNL_EXPR_LOG_PREFIX))};
  }
  if (name == "masq") return Masquerade{};
  if (name == "reject") {
    return Reject{u32(NFTNL_EXPR_REJECT_TYPE), nftnl_expr_get_u8(e, NFTNL_EXPR_REJECT_CODE)};
  }
  return Unknown{name};
}

// libnftnl reads any message as what it was asked for: attributes of a chain as those of a rule.
bool is(const nlmsghdr* message, std::uint16_t kind) {
  return message->nlmsg_type == ((NFNL_SUBSYS_NFTABLES << 8) | kind) &&
         message->nlmsg_len >= MNL_NLMSG_HDRLEN + sizeof(nfgenmsg);
}

// For an attribute of an element that is newer than itself, libnftnl 1.2 writes past an array.
int check_element(const nlattr* element, void* /*data*/) {
  return mnl_attr_parse_nested(
      element,
      [](const nlattr* attribute, void* /*data*/) {
        return mnl_attr_get_type(attribute) > NFTA_SET_ELEM_EXPRESSIONS ? MNL_CB_ERROR : MNL_CB_OK;
      },
      nullptr);
}
bool has_known_attributes(const nlmsghdr* elements) {
  const auto check = [](const nlattr* attribute, void* /*data*/) {
    return mnl_attr_get_type(attribute) == NFTA_SET_ELEM_LIST_ELEMENTS
               ? mnl_attr_parse_nested(attribute, check_element, nullptr)
               : MNL_CB_OK;
  };
  return mnl_attr_parse(elements, sizeof(nfgenmsg), check, nullptr) != MNL_CB_ERROR;
}

}  // namespace

Bytes table(std::uint16_t type, std::uint16_t flags, Family family,
            std::optional<std::uint32_t> table_flags) {
  const TablePtr object(nftnl_table_alloc());
  nftnl_table_set_str(object.get(), NFTNL_TABLE_NAME, kTable);
  nftnl_table_set_u32(object.get(), NFTNL_TABLE_FAMILY, static_cast<std::uint32_t>(family));
  if (table_flags) nftnl_table_set_u32(object.get(), NFTNL_TABLE_FLAGS, *table_flags);
  return message(type, flags, family,
                 [&](nlmsghdr* header) { nftnl_table_nlmsg_build_payload(header, object.get()); });
}

Bytes chain(std::uint16_t type, std::uint16_t flags, Family family, const std::string& name,
            const Chain* value) {
  const ChainPtr object(nftnl_chain_alloc());
  nftnl_chain_set_str(object.get(), NFTNL_CHAIN_TABLE, kTable);
  if (!name.empty()) nftnl_chain_set_str(object.get(), NFTNL_CHAIN_NAME, name.c_str());
  if (value != nullptr && value->hook) {
    const Hook& hook = *value->hook;
    nftnl_chain_set_str(object.get(), NFTNL_CHAIN_TYPE, hook.type.c_str());
    nftnl_chain_set_u32(object.get(), NFTNL_CHAIN_HOOKNUM, hook.number);
    nftnl_chain_set_s32(object.get(), NFTNL_CHAIN_PRIO, hook.priority);
    nftnl_chain_set_u32(object.get(), NFTNL_CHAIN_POLICY, hook.policy);
    if (!hook.device.empty()) {
      nftnl_chain_set_str(object.get(), NFTNL_CHAIN_DEV, hook.device.c_str());
    }
  }
  return message(type, flags, family,
                 [&](nlmsghdr* header) { nftnl_chain_nlmsg_build_payload(header, object.get()); });
}

Bytes rule(std::uint16_t type, std::uint16_t flags, Family family, const std::string& chain,
           const Rule* value) {
  const RulePtr object(nftnl_rule_alloc());
  nftnl_rule_set_str(object.get(), NFTNL_RULE_TABLE, kTable);
  if (!chain.empty()) nftnl_rule_set_str(object.get(), NFTNL_RULE_CHAIN, chain.c_str());
  if (value != nullptr) {
    for (const Expression& expression : value->expressions) {
      std::visit(Encoder{object.get()}, expression);
    }
    if (!value->comment.empty()) {
      const Bytes data = comment_data(NFTNL_UDATA_RULE_COMMENT, value->comment);
      nftnl_rule_set_data(object.get(), NFTNL_RULE_USERDATA, data.data(),
                          static_cast<std::uint32_t>(data.size()));
    }
  }
  return message(type, flags, family,
                 [&](nlmsghdr* header) { nftnl_rule_nlmsg_build_payload(header, object.get()); });
}

Bytes set(std::uint16_t type, std::uint16_t flags, Family family, const std::string& name,
          const Set* value, std::uint32_t id) {
  const SetPtr object(nftnl_set_alloc());
  nftnl_set_set_str(object.get(), NFTNL_SET_TABLE, kTable);
  if (!name.empty()) nftnl_set_set_str(object.get(), NFTNL_SET_NAME, name.c_str());
  if (value != nullptr) {
    nftnl_set_set_u32(object.get(), NFTNL_SET_FLAGS, value->flags);
    nftnl_set_set_u32(object.get(), NFTNL_SET_KEY_TYPE, value->key_type);
    nftnl_set_set_u32(object.get(), NFTNL_SET_KEY_LEN, value->key_length);
    nftnl_set_set_u32(object.get(), NFTNL_SET_ID, id);
    if ((value->flags & NFT_SET_MAP) != 0) {
      nftnl_set_set_u32(object.get(), NFTNL_SET_DATA_TYPE, NFT_DATA_VERDICT);
      nftnl_set_set_u32(object.get(), NFTNL_SET_DATA_LEN, 0);
    }
    if (!value->fields.empty()) {
      nftnl_set_set_data(object.get(), NFTNL_SET_DESC_CONCAT, value->fields.data(),
                         static_cast<std::uint32_t>(value->fields.size()));
    }
    // Without the byte order nft prints keys as raw numbers.
    const UdataPtr userdata(nftnl_udata_buf_alloc(NFT_USERDATA_MAXLEN));
    if (userdata) {
      nftnl_udata_put_u32(userdata.get(), NFTNL_UDATA_SET_KEYBYTEORDER, 2 /* big endian */);
      nftnl_set_set_data(object.get(), NFTNL_SET_USERDATA, nftnl_udata_buf_data(userdata.get()),
                         nftnl_udata_buf_len(userdata.get()));
    }
  }
  return message(type, flags, family,
                 [&](nlmsghdr* header) { nftnl_set_nlmsg_build_payload(header, object.get()); });
}

Bytes elements(std::uint16_t type, std::uint16_t flags, Family family, const std::string& set,
               const Element* begin, const Element* end) {
  const SetPtr object(nftnl_set_alloc());
  nftnl_set_set_str(object.get(), NFTNL_SET_TABLE, kTable);
  nftnl_set_set_str(object.get(), NFTNL_SET_NAME, set.c_str());
  for (const Element* e = begin; e != end; ++e) {
    nftnl_set_elem* element = nftnl_set_elem_alloc();
    if (element == nullptr) break;
    nftnl_set_elem_set(element, NFTNL_SET_ELEM_KEY, e->key.data(),
                       static_cast<std::uint32_t>(e->key.size()));
    if (!e->key_end.empty()) {
      nftnl_set_elem_set(element, NFTNL_SET_ELEM_KEY_END, e->key_end.data(),
                         static_cast<std::uint32_t>(e->key_end.size()));
    }
    if (e->interval_end) {
      nftnl_set_elem_set_u32(element, NFTNL_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END);
    }
    if (e->verdict) {
      nftnl_set_elem_set_u32(element, NFTNL_SET_ELEM_VERDICT,
                             static_cast<std::uint32_t>(e->verdict->code));
      if (!e->verdict->chain.empty()) {
        nftnl_set_elem_set_str(element, NFTNL_SET_ELEM_CHAIN, e->verdict->chain.c_str());
      }
    }
    if (!e->comment.empty()) {
      const Bytes data = comment_data(NFTNL_UDATA_SET_ELEM_COMMENT, e->comment);
      nftnl_set_elem_set(element, NFTNL_SET_ELEM_USERDATA, data.data(),
                         static_cast<std::uint32_t>(data.size()));
    }
    nftnl_set_elem_add(object.get(), element);
  }
  return message(type, flags, family, [&](nlmsghdr* header) {
    nftnl_set_elems_nlmsg_build_payload(header, object.get());
  });
}

std::optional<std::pair<std::string, std::uint32_t>> parse_table(const nlmsghdr* message) {
  if (!is(message, NFT_MSG_NEWTABLE)) return std::nullopt;
  const TablePtr object(nftnl_table_alloc());
  if (nftnl_table_nlmsg_parse(message, object.get()) < 0) return std::nullopt;
  return std::pair(text_of(nftnl_table_get_str(object.get(), NFTNL_TABLE_NAME)),
                   nftnl_table_get_u32(object.get(), NFTNL_TABLE_FLAGS));
}

std::optional<NamedChain> parse_chain(const nlmsghdr* message) {
  if (!is(message, NFT_MSG_NEWCHAIN)) return std::nullopt;
  const ChainPtr object(nftnl_chain_alloc());
  if (nftnl_chain_nlmsg_parse(message, object.get()) < 0) return std::nullopt;
  NamedChain out;
  out.table = text_of(nftnl_chain_get_str(object.get(), NFTNL_CHAIN_TABLE));
  out.name = text_of(nftnl_chain_get_str(object.get(), NFTNL_CHAIN_NAME));
  if (nftnl_chain_is_set(object.get(), NFTNL_CHAIN_HOOKNUM)) {
    Hook hook;
    hook.type = text_of(nftnl_chain_get_str(object.get(), NFTNL_CHAIN_TYPE));
    hook.number = nftnl_chain_get_u32(object.get(), NFTNL_CHAIN_HOOKNUM);
    hook.priority = nftnl_chain_get_s32(object.get(), NFTNL_CHAIN_PRIO);
    hook.policy = nftnl_chain_get_u32(object.get(), NFTNL_CHAIN_POLICY);
    hook.device = text_of(nftnl_chain_get_str(object.get(), NFTNL_CHAIN_DEV));
    out.chain.hook = std::move(hook);
  }
  return out;
}

std::optional<NamedRule> parse_rule(const nlmsghdr* message) {
  if (!is(message, NFT_MSG_NEWRULE)) return std::nullopt;
  const RulePtr object(nftnl_rule_alloc());
  if (nftnl_rule_nlmsg_parse(message, object.get()) < 0) return std::nullopt;
  NamedRule out;
  out.table = text_of(nftnl_rule_get_str(object.get(), NFTNL_RULE_TABLE));
  out.chain = text_of(nftnl_rule_get_str(object.get(), NFTNL_RULE_CHAIN));
  nftnl_expr_foreach(
      object.get(),
      [](nftnl_expr* expr, void* data) {
        static_cast<Rule*>(data)->expressions.push_back(decode(expr));
        return 0;
      },
      &out.rule);
  std::uint32_t length = 0;
  const void* data = nftnl_rule_get_data(object.get(), NFTNL_RULE_USERDATA, &length);
  out.rule.comment = comment_of(data, length, NFTNL_UDATA_RULE_COMMENT);
  return out;
}

std::optional<NamedSet> parse_set(const nlmsghdr* message) {
  if (!is(message, NFT_MSG_NEWSET)) return std::nullopt;
  const SetPtr object(nftnl_set_alloc());
  if (nftnl_set_nlmsg_parse(message, object.get()) < 0) return std::nullopt;
  NamedSet out;
  out.table = text_of(nftnl_set_get_str(object.get(), NFTNL_SET_TABLE));
  out.name = text_of(nftnl_set_get_str(object.get(), NFTNL_SET_NAME));
  out.set.flags = nftnl_set_get_u32(object.get(), NFTNL_SET_FLAGS);
  out.set.key_type = nftnl_set_get_u32(object.get(), NFTNL_SET_KEY_TYPE);
  out.set.key_length = nftnl_set_get_u32(object.get(), NFTNL_SET_KEY_LEN);
  std::uint32_t length = 0;
  const auto* fields = static_cast<const std::uint8_t*>(
      nftnl_set_get_data(object.get(), NFTNL_SET_DESC_CONCAT, &length));
  if (fields != nullptr && nftnl_set_is_set(object.get(), NFTNL_SET_DESC_CONCAT)) {
    out.set.fields.assign(fields, fields + length);
  }
  return out;
}

std::optional<std::vector<Element>> parse_elements(const nlmsghdr* message) {
  if (!is(message, NFT_MSG_NEWSETELEM) || !has_known_attributes(message)) return std::nullopt;
  const SetPtr object(nftnl_set_alloc());
  if (nftnl_set_elems_nlmsg_parse(message, object.get()) < 0) return std::nullopt;
  std::vector<Element> out;
  nftnl_set_elem_foreach(
      object.get(),
      [](nftnl_set_elem* e, void* data) {
        const auto bytes = [&](std::uint16_t attribute) {
          std::uint32_t length = 0;
          const auto* value =
              static_cast<const std::uint8_t*>(nftnl_set_elem_get(e, attribute, &length));
          return value == nullptr ? Bytes{} : Bytes(value, value + length);
        };
        Element element;
        if (nftnl_set_elem_is_set(e, NFTNL_SET_ELEM_KEY)) element.key = bytes(NFTNL_SET_ELEM_KEY);
        if (nftnl_set_elem_is_set(e, NFTNL_SET_ELEM_KEY_END)) {
          element.key_end = bytes(NFTNL_SET_ELEM_KEY_END);
        }
        if (nftnl_set_elem_is_set(e, NFTNL_SET_ELEM_FLAGS)) {
          element.interval_end =
              (nftnl_set_elem_get_u32(e, NFTNL_SET_ELEM_FLAGS) & NFT_SET_ELEM_INTERVAL_END) != 0;
        }
        if (nftnl_set_elem_is_set(e, NFTNL_SET_ELEM_VERDICT)) {
          element.verdict =
              Verdict{static_cast<std::int32_t>(nftnl_set_elem_get_u32(e, NFTNL_SET_ELEM_VERDICT)),
                      text_of(nftnl_set_elem_get_str(e, NFTNL_SET_ELEM_CHAIN))};
        }
        std::uint32_t length = 0;
        const void* userdata = nftnl_set_elem_get(e, NFTNL_SET_ELEM_USERDATA, &length);
        if (nftnl_set_elem_is_set(e, NFTNL_SET_ELEM_USERDATA)) {
          element.comment = comment_of(userdata, length, NFTNL_UDATA_SET_ELEM_COMMENT);
        }
        static_cast<std::vector<Element>*>(data)->push_back(std::move(element));
        return 0;
      },
      &out);
  return out;
}

}  // namespace agentgate::netdriver::nft::wire

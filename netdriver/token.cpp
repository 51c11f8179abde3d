// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/token.h"

#include <arpa/inet.h>
#include <libmnl/libmnl.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <linux/rtnetlink.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "netdriver/gate.h"

namespace agentgate::netdriver {
namespace {

constexpr std::uint32_t kIngress = TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS);
constexpr std::uint32_t kEgress = TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS);
// The first place of all: the filters of a direction are asked in this order.
constexpr std::uint32_t kPreference = 1;
constexpr std::uint32_t kHandle = 1;
constexpr const char* kName = "agentgate";

// -- The programs -----------------------------------------------------------------------------

bpf_insn load_context(std::uint8_t to, std::size_t offset) {  // to = *(u32*)(r1 + offset)
  return {BPF_LDX | BPF_MEM | BPF_W, to, BPF_REG_1, static_cast<std::int16_t>(offset), 0};
}
bpf_insn set(std::uint8_t to, std::int32_t value) {
  return {BPF_ALU64 | BPF_MOV | BPF_K, to, 0, 0, value};
}
bpf_insn mask(std::uint8_t what, std::int32_t bits) {
  return {BPF_ALU64 | BPF_AND | BPF_K, what, 0, 0, bits};
}
bpf_insn jump_if_equal(std::uint8_t what, std::int32_t value, std::int16_t over) {
  return {BPF_JMP | BPF_JEQ | BPF_K, what, 0, over, value};
}
bpf_insn leave() { return {BPF_JMP | BPF_EXIT, 0, 0, 0, 0}; }

// Passing is TC_ACT_UNSPEC: it asks the next filter, so that others' are not switched off.
std::vector<bpf_insn> ingress_program() {
  return {
      load_context(BPF_REG_2, offsetof(__sk_buff, mark)),
      mask(BPF_REG_2, kMarkMask),
      set(BPF_REG_0, TC_ACT_UNSPEC),
      jump_if_equal(BPF_REG_2, kPortMark, 1),
      set(BPF_REG_0, TC_ACT_SHOT),
      leave(),
  };
}
std::vector<bpf_insn> egress_program() {
  return {
      load_context(BPF_REG_2, offsetof(__sk_buff, mark)),
      load_context(BPF_REG_3, offsetof(__sk_buff, protocol)),
      mask(BPF_REG_2, kMarkMask),
      set(BPF_REG_0, TC_ACT_UNSPEC),
      jump_if_equal(BPF_REG_2, kVerdictMark, 2),
      jump_if_equal(BPF_REG_3, htons(ETH_P_ARP), 1),  // in network order, as skb->protocol
      set(BPF_REG_0, TC_ACT_SHOT),
      leave(),
  };
}

long bpf(int command, bpf_attr& attributes) {
  return ::syscall(SYS_bpf, command, &attributes, sizeof attributes);
}

tl::unexpected<Error> load_failed(const std::string& operation, int code) {
  std::string text;
  if (code == ENOSYS) {
    text = "the kernel has no bpf(2): it needs CONFIG_BPF_SYSCALL";
  } else if (code == EPERM || code == EACCES) {
    text =
        "not allowed: it needs CAP_BPF and CAP_NET_ADMIN (CAP_SYS_ADMIN before Linux 5.8), and "
        "a seccomp profile that lets bpf(2) through";
  }
  return fail(operation, text, code);
}

// -- rtnetlink --------------------------------------------------------------------------------

// One request with room for a filter of ours.
struct Request {
  alignas(8) char buffer[512] = {};
  nlmsghdr* message = nullptr;

  Request(std::uint16_t type, std::uint16_t flags, std::uint32_t ifindex, std::uint32_t parent,
          std::uint32_t handle, std::uint32_t info) {
    message = mnl_nlmsg_put_header(buffer);
    message->nlmsg_type = type;
    message->nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
    auto* header = static_cast<tcmsg*>(mnl_nlmsg_put_extra_header(message, sizeof(tcmsg)));
    header->tcm_family = AF_UNSPEC;
    header->tcm_ifindex = static_cast<int>(ifindex);
    header->tcm_parent = parent;
    header->tcm_handle = handle;
    header->tcm_info = info;
  }
  Request(const Request&) = delete;  // message points into buffer
  Request& operator=(const Request&) = delete;
};

constexpr std::uint32_t filter_info() {
  return TC_H_MAKE(kPreference << 16, __builtin_bswap16(ETH_P_ALL));
}

template <class Visit>
void each_attribute(const nlattr* first, std::size_t size, Visit&& visit) {
  for (const nlattr* at = first;
       mnl_attr_ok(at, static_cast<int>(reinterpret_cast<const char*>(first) + size -
                                        reinterpret_cast<const char*>(at)));
       at = mnl_attr_next(at)) {
    visit(at);
  }
}

// The attributes of a tc message; none if it is too short to have a header.
template <class Visit>
void each_attribute_of(const nlmsghdr* message, Visit&& visit) {
  if (message->nlmsg_len < MNL_NLMSG_HDRLEN + sizeof(tcmsg)) return;
  each_attribute(static_cast<const nlattr*>(mnl_nlmsg_get_payload_offset(message, sizeof(tcmsg))),
                 message->nlmsg_len - MNL_NLMSG_HDRLEN - sizeof(tcmsg), visit);
}

std::string text_of(const nlattr* a) {
  const auto* payload = static_cast<const char*>(mnl_attr_get_payload(a));
  return {payload, ::strnlen(payload, mnl_attr_get_payload_len(a))};
}
std::uint32_t number_of(const nlattr* a) {
  return mnl_attr_get_payload_len(a) == sizeof(std::uint32_t) ? mnl_attr_get_u32(a) : 0;
}
std::string kind_of(const nlmsghdr* message) {
  std::string out;
  each_attribute_of(message, [&](const nlattr* a) {
    if (mnl_attr_get_type(a) == TCA_KIND) out = text_of(a);
  });
  return out;
}

// What is compared of one filter of a dump.
struct Filter {
  std::uint32_t info = 0;
  std::uint32_t chain = 0;
  std::string kind;
  std::vector<std::uint8_t> tag;
  std::uint32_t flags = 0;
};

// Nothing for the message that only announces a preference: it has no options.
std::optional<Filter> parse_filter(const nlmsghdr* message, std::uint32_t ifindex,
                                   std::uint32_t parent) {
  if (message->nlmsg_type != RTM_NEWTFILTER ||
      message->nlmsg_len < MNL_NLMSG_HDRLEN + sizeof(tcmsg)) {
    return std::nullopt;
  }
  const auto* header = static_cast<const tcmsg*>(mnl_nlmsg_get_payload(message));
  if (header->tcm_ifindex != static_cast<int>(ifindex) || header->tcm_parent != parent) {
    return std::nullopt;
  }
  Filter out;
  out.info = header->tcm_info;
  out.kind = kind_of(message);
  const nlattr* options = nullptr;
  each_attribute_of(message, [&](const nlattr* a) {
    if (mnl_attr_get_type(a) == TCA_CHAIN) out.chain = number_of(a);
    if (mnl_attr_get_type(a) == TCA_OPTIONS) options = a;
  });
  if (options == nullptr) return std::nullopt;
  if (out.kind != "bpf") return out;
  each_attribute(static_cast<const nlattr*>(mnl_attr_get_payload(options)),
                 mnl_attr_get_payload_len(options), [&](const nlattr* a) {
                   const auto* payload = static_cast<const std::uint8_t*>(mnl_attr_get_payload(a));
                   if (mnl_attr_get_type(a) == TCA_BPF_TAG)
                     out.tag.assign(payload, payload + mnl_attr_get_payload_len(a));
                   if (mnl_attr_get_type(a) == TCA_BPF_FLAGS) out.flags = number_of(a);
                 });
  return out;
}

}  // namespace

Token::Token(NetlinkSocket socket, Program ingress, Program egress)
    : socket_(std::move(socket)), ingress_(std::move(ingress)), egress_(std::move(egress)) {}

Result<Token> Token::open() {
  auto socket = NetlinkSocket::open(NETLINK_ROUTE);
  if (!socket) return tl::unexpected(socket.error());
  auto ingress = load(true);
  if (!ingress) return tl::unexpected(ingress.error());
  auto egress = load(false);
  if (!egress) return tl::unexpected(egress.error());
  return Token(std::move(*socket), std::move(*ingress), std::move(*egress));
}

Result<Token::Program> Token::load(bool ingress) {
  const std::string operation =
      std::string("load the token's ") + (ingress ? "ingress" : "egress") + " program";
  const auto instructions = ingress ? ingress_program() : egress_program();
  bpf_attr attributes{};
  attributes.prog_type = BPF_PROG_TYPE_SCHED_CLS;
  attributes.insns = reinterpret_cast<std::uint64_t>(instructions.data());
  attributes.insn_cnt = static_cast<std::uint32_t>(instructions.size());
  attributes.license = reinterpret_cast<std::uint64_t>("GPL");
  std::strncpy(attributes.prog_name, ingress ? "agentgate_in" : "agentgate_out",
               sizeof attributes.prog_name - 1);
  Program out;
  out.fd = UniqueFd(static_cast<int>(bpf(BPF_PROG_LOAD, attributes)));
  if (!out.fd.valid()) return load_failed(operation, errno);
  bpf_prog_info info{};
  attributes = {};
  attributes.info.bpf_fd = static_cast<std::uint32_t>(out.fd.get());
  attributes.info.info = reinterpret_cast<std::uint64_t>(&info);
  attributes.info.info_len = sizeof info;
  if (bpf(BPF_OBJ_GET_INFO_BY_FD, attributes) < 0) return load_failed(operation, errno);
  std::memcpy(out.tag.data(), info.tag, out.tag.size());
  return out;
}

Status Token::attach(std::uint32_t ifindex) {
  const std::string operation = "attach the token to link " + std::to_string(ifindex);
  Request qdisc(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, ifindex, TC_H_CLSACT,
                TC_H_MAKE(TC_H_CLSACT, 0), 0);
  mnl_attr_put_strz(qdisc.message, TCA_KIND, "clsact");
  Status status = socket_.request(qdisc.message, operation);
  if (!status && status.error().code == ENOENT) {
    status.error().text = "no clsact qdisc: the kernel needs CONFIG_NET_SCH_INGRESS (sch_ingress)";
  }
  if (!status && status.error().code == EEXIST) status = is_clsact(ifindex, operation);
  if (!status) return status;
  for (const auto& [parent, program] :
       {std::pair<std::uint32_t, const Program*>{kIngress, &ingress_}, {kEgress, &egress_}}) {
    // Without NLM_F_EXCL a filter with our handle is replaced.
    Request filter(RTM_NEWTFILTER, NLM_F_CREATE, ifindex, parent, kHandle, filter_info());
    mnl_attr_put_strz(filter.message, TCA_KIND, "bpf");
    nlattr* options = mnl_attr_nest_start(filter.message, TCA_OPTIONS);
    mnl_attr_put_u32(filter.message, TCA_BPF_FD, static_cast<std::uint32_t>(program->fd.get()));
    mnl_attr_put_strz(filter.message, TCA_BPF_NAME, kName);
    mnl_attr_put_u32(filter.message, TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT);
    mnl_attr_nest_end(filter.message, options);
    status = socket_.request(filter.message, operation);
    if (status) continue;
    Error& error = status.error();
    if (error.code == ENOENT) {
      error.text = "no BPF classifier: the kernel needs CONFIG_NET_CLS_BPF (cls_bpf)";
    } else if (error.code == EINVAL) {
      // A preference has one kind of filter only.
      error.code = EBUSY;
      error.text = "another program's filter is in the way (tc filter show): " + error.text;
    }
    return status;
  }
  const auto attached = present(ifindex);
  if (!attached) return tl::unexpected(attached.error());
  if (!*attached) return fail(operation, "another program's filter is asked before it", EBUSY);
  return {};
}

// A qdisc `ingress` has the same place. It takes filters for egress, too, and asks them at ingress.
Status Token::is_clsact(std::uint32_t ifindex, const std::string& operation) {
  // The answer is a notification: without NLM_F_ECHO only listeners have it.
  Request get(RTM_GETQDISC, NLM_F_ECHO, ifindex, TC_H_CLSACT, 0, 0);
  std::string kind;
  Status status = socket_.request(get.message, operation, [&](const nlmsghdr* message) {
    if (message->nlmsg_type == RTM_NEWQDISC) kind = kind_of(message);
  });
  if (status && kind != "clsact") {
    return fail(operation, "the link has another program's qdisc '" + kind + "'", EBUSY);
  }
  return status;
}

Result<bool> Token::first_is(std::uint32_t ifindex, std::uint32_t parent, const Program& program) {
  Request dump(RTM_GETTFILTER, NLM_F_DUMP, ifindex, parent, 0, 0);
  std::optional<Filter> first;
  const Status status = socket_.request(
      dump.message, "read the filters of link " + std::to_string(ifindex),
      [&](const nlmsghdr* message) {
        // Chains other than 0 are asked only if somebody jumps to them.
        auto filter = parse_filter(message, ifindex, parent);
        if (filter && filter->chain == 0 && !first) first = std::move(filter);
      },
      [&] { first.reset(); });
  if (!status) return tl::unexpected(status.error());
  return first && first->kind == "bpf" && first->info == filter_info() &&
         (first->flags & TCA_BPF_FLAG_ACT_DIRECT) != 0 &&
         first->tag == std::vector<std::uint8_t>(program.tag.begin(), program.tag.end());
}

Result<bool> Token::present(std::uint32_t ifindex) {
  auto in = first_is(ifindex, kIngress, ingress_);
  if (!in || !*in) return in;
  return first_is(ifindex, kEgress, egress_);
}

Status Token::detach(std::uint32_t ifindex) {
  for (const std::uint32_t parent : {kIngress, kEgress}) {
    Request filter(RTM_DELTFILTER, 0, ifindex, parent, kHandle, filter_info());
    mnl_attr_put_strz(filter.message, TCA_KIND, "bpf");
    Status status =
        socket_.request(filter.message, "detach the token from link " + std::to_string(ifindex));
    // EINVAL: no clsact; ENOENT: no such filter; ENODEV: no such link.
    if (!status && status.error().code != ENOENT && status.error().code != EINVAL &&
        status.error().code != ENODEV) {
      return status;
    }
  }
  return {};
}

}  // namespace agentgate::netdriver

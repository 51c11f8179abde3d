// SPDX-License-Identifier: GPL-2.0-or-later
//
// nftables answers and notifications of both kinds: no decoder reads past a message's end, and what
// decodes compares and prints without falling over.
//
// libnftnl calls exit() on an attribute whose type is not the one it knows ("nf_tables kernel ABI
// is broken"). The kernel alone sends these messages and sends none such, but most mutations are:
// here exit() is taken over while a decoder runs, and leaves it by an exception.
#include <dlfcn.h>
#include <libmnl/libmnl.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "netdriver/monitor.h"
#include "netdriver/nft_wire.h"

// Of <sanitizer/lsan_interface.h>; not there in a build without ASan.
extern "C" __attribute__((weak)) void __lsan_disable();
extern "C" __attribute__((weak)) void __lsan_enable();

namespace {
namespace nft = agentgate::netdriver::nft;

struct AbiBroken {};
bool decoding = false;
}  // namespace

// exit(), under a name whose declaration does not say that it never throws.
extern "C" [[noreturn]] void fuzz_exit(int code) __asm__("exit");
extern "C" [[noreturn]] void fuzz_exit(int code) {
  if (decoding) throw AbiBroken{};
  reinterpret_cast<void (*)(int)>(::dlsym(RTLD_NEXT, "exit"))(code);
  std::abort();
}

namespace {

// What libnftnl holds when it gives up is lost; what it says then is of no interest.
template <class Decode>
auto decode(const Decode& parse) -> decltype(parse()) {
  decoding = true;
  if (__lsan_disable != nullptr) __lsan_disable();
  decltype(parse()) out;
  try {
    out = parse();
  } catch (const AbiBroken&) {
  }
  if (__lsan_enable != nullptr) __lsan_enable();
  decoding = false;
  return out;
}

// Whether `check` holds for every attribute of a nest.
template <class Check>
bool each(const void* begin, std::ptrdiff_t size, const Check& check) {
  const auto* at = static_cast<const nlattr*>(begin);
  const auto* end = static_cast<const char*>(begin) + size;
  for (; mnl_attr_ok(at, static_cast<int>(end - reinterpret_cast<const char*>(at)));
       at = mnl_attr_next(at)) {
    if (!check(at)) return false;
  }
  return true;
}
template <class Check>
bool each(const nlattr* nest, const Check& check) {
  return each(mnl_attr_get_payload(nest), mnl_attr_get_payload_len(nest), check);
}
bool has(const nlattr* nest, int type) {
  return !each(nest, [&](const nlattr* at) { return mnl_attr_get_type(at) != type; });
}

// libnftnl follows null pointers where an expression has no name and where a jump has no chain. The
// kernel sends no such thing, and neither do we hand it on.
bool sound_data(const nlattr* data) {
  return each(data, [](const nlattr* at) {
    return mnl_attr_get_type(at) != NFTA_DATA_VERDICT || has(at, NFTA_VERDICT_CHAIN);
  });
}
bool sound_expression(const nlattr* expression) {
  return has(expression, NFTA_EXPR_NAME) && each(expression, [](const nlattr* at) {
           return mnl_attr_get_type(at) != NFTA_EXPR_DATA || each(at, sound_data);
         });
}
bool sound_expressions(const nlattr* list) { return each(list, sound_expression); }
bool sound_element(const nlattr* element) {
  return each(element, [](const nlattr* at) {
    switch (mnl_attr_get_type(at)) {
      case NFTA_SET_ELEM_EXPR:
        return sound_expression(at);
      case NFTA_SET_ELEM_EXPRESSIONS:
        return sound_expressions(at);
      case NFTA_SET_ELEM_KEY:
      case NFTA_SET_ELEM_KEY_END:
      case NFTA_SET_ELEM_DATA:
        return sound_data(at);
      default:
        return true;
    }
  });
}
bool is_sound(const nlmsghdr* message) {
  const std::ptrdiff_t header = NLMSG_HDRLEN + MNL_ALIGN(sizeof(nfgenmsg));
  const int kind = NFNL_MSG_TYPE(message->nlmsg_type);
  return each(reinterpret_cast<const char*>(message) + header, message->nlmsg_len - header,
              [&](const nlattr* at) {
                const int type = mnl_attr_get_type(at);
                if (kind == NFT_MSG_NEWRULE && type == NFTA_RULE_EXPRESSIONS) {
                  return sound_expressions(at);
                }
                if (kind == NFT_MSG_NEWSET && type == NFTA_SET_EXPR) return sound_expression(at);
                if (kind == NFT_MSG_NEWSET && type == NFTA_SET_EXPRESSIONS) {
                  return sound_expressions(at);
                }
                return kind != NFT_MSG_NEWSETELEM || type != NFTA_SET_ELEM_LIST_ELEMENTS ||
                       each(at, sound_element);
              });
}

template <class Value>
void compare_with_itself(const Value& value) {
  std::vector<agentgate::netdriver::Difference> out;
  nft::compare("fuzz", value, value, out);
}
std::unique_ptr<std::uint8_t[]> copy_of(const std::uint8_t* data, std::size_t size,
                                        std::size_t allocated) {
  auto block = std::make_unique<std::uint8_t[]>(allocated);
  std::memcpy(block.get(), data, size);
  const auto length = static_cast<std::uint32_t>(size);
  std::memcpy(block.get(), &length, sizeof length);
  return block;
}

void decode_all(const nlmsghdr* message) {
  (void)decode([&] { return nft::wire::parse_table(message); });
  const auto chain = decode([&] { return nft::wire::parse_chain(message); });
  if (chain) compare_with_itself(chain->chain);
  const auto rule = decode([&] { return nft::wire::parse_rule(message); });
  if (rule) (void)nft::to_string(rule->rule);
  const auto set = decode([&] { return nft::wire::parse_set(message); });
  if (set) compare_with_itself(set->set);
  const auto elements = decode([&] { return nft::wire::parse_elements(message); });
  if (!elements) return;
  for (const auto& element : *elements) (void)nft::to_string(element);
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < sizeof(nlmsghdr)) return 0;
  // What we read ourselves is in a block of its own size, with the length that the socket would
  // have checked.
  const auto block = copy_of(data, size, size);
  const auto* message = reinterpret_cast<const nlmsghdr*>(block.get());
  agentgate::netdriver::Notices notices;
  std::map<std::uint32_t, agentgate::InterfaceName> names;
  agentgate::netdriver::Monitor::note_nft(message, 1, notices);
  agentgate::netdriver::Monitor::note_rtnl(message, names, notices);
  (void)notices.empty();

  // libmnl relies on padded attributes, and libnftnl on strings that end.
  size -= size % NLMSG_ALIGNTO;
  const auto padded = copy_of(data, size, size + 1);
  message = reinterpret_cast<const nlmsghdr*>(padded.get());
  if (is_sound(message)) decode_all(message);
  return 0;
}

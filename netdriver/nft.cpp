// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/nft.h"

#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>

#include <algorithm>
#include <tuple>

namespace agentgate::netdriver::nft {
namespace {

std::string hex(const Bytes& bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (const std::uint8_t byte : bytes) {
    out += digits[byte >> 4];
    out += digits[byte & 0xF];
  }
  return out;
}

std::string reg(std::uint32_t number) { return "r" + std::to_string(number); }

std::string verdict_text(const Verdict& verdict) {
  switch (verdict.code) {
    case NF_ACCEPT:
      return "accept";
    case NF_DROP:
      return "drop";
    case NFT_JUMP:
      return "jump " + verdict.chain;
    case NFT_GOTO:
      return "goto " + verdict.chain;
    case NFT_RETURN:
      return "return";
    default:
      return "verdict " + std::to_string(verdict.code);
  }
}

struct Printer {
  std::string operator()(const Payload& e) const {
    return "payload(" + std::to_string(e.base) + "+" + std::to_string(e.offset) + "," +
           std::to_string(e.length) + ")->" + reg(e.reg);
  }
  std::string operator()(const Meta& e) const {
    return "meta(" + std::to_string(e.key) + ")->" + reg(e.reg);
  }
  std::string operator()(const MetaSet& e) const {
    return reg(e.reg) + "->meta(" + std::to_string(e.key) + ")";
  }
  std::string operator()(const Ct& e) const {
    return "ct(" + std::to_string(e.key) + ")->" + reg(e.reg);
  }
  std::string operator()(const Cmp& e) const {
    static constexpr const char* ops[] = {"==", "!=", "<", "<=", ">", ">="};
    return reg(e.reg) + (e.op < 6 ? ops[e.op] : "?") + hex(e.data);
  }
  std::string operator()(const Bitwise& e) const {
    return reg(e.reg) + "&" + hex(e.mask) + "^" + hex(e.value);
  }
  std::string operator()(const Lookup& e) const {
    return reg(e.reg) + (e.verdict_map ? " vmap @" : " in @") + e.set;
  }
  std::string operator()(const Verdict& e) const { return verdict_text(e); }
  std::string operator()(const Counter& /*e*/) const { return "counter"; }
  std::string operator()(const Limit& e) const {
    return "limit " + std::to_string(e.rate) + "/" + std::to_string(e.unit) + "s burst " +
           std::to_string(e.burst);
  }
  std::string operator()(const Log& e) const {
    return "log group " + std::to_string(e.group) + " '" + e.prefix + "'";
  }
  std::string operator()(const Masquerade& /*e*/) const { return "masquerade"; }
  std::string operator()(const Reject& e) const {
    return "reject " + std::to_string(e.type) + "," + std::to_string(e.code);
  }
  std::string operator()(const Unknown& e) const { return "unknown(" + e.name + ")"; }
};

}  // namespace

bool Element::operator<(const Element& other) const {
  const auto rank = [](const Element& e) {
    return std::tie(e.key, e.key_end, e.verdict, e.comment);
  };
  if (key != other.key) return key < other.key;
  if (interval_end != other.interval_end) return interval_end;
  return rank(*this) < rank(other);
}

std::string to_string(const Expression& expression) { return std::visit(Printer{}, expression); }

std::string to_string(const Rule& rule) {
  std::string out;
  for (const auto& expression : rule.expressions) {
    if (!out.empty()) out += ' ';
    out += to_string(expression);
  }
  if (!rule.comment.empty()) out += " # " + rule.comment;
  return out.empty() ? "(empty rule)" : out;
}

std::string to_string(const Element& element) {
  std::string out = hex(element.key);
  if (!element.key_end.empty()) out += "-" + hex(element.key_end);
  if (element.interval_end) out += " (end)";
  if (element.verdict) out += " : " + verdict_text(*element.verdict);
  if (!element.comment.empty()) out += " # " + element.comment;
  return out;
}

std::string to_string(const Hook& hook) {
  return hook.type + " hook " + std::to_string(hook.number) + " priority " +
         std::to_string(hook.priority) + " policy " + (hook.policy == NF_DROP ? "drop" : "accept") +
         (hook.device.empty() ? "" : " device " + hook.device);
}

std::string_view to_string(Family family) {
  switch (family) {
    case Family::inet:
      return "inet";
    case Family::ip:
      return "ip";
    case Family::netdev:
      return "netdev";
    case Family::bridge:
      return "bridge";
  }
  return "?";
}

void compare(const std::string& where, const Chain& expected, const Chain& found,
             std::vector<Difference>& out) {
  if (expected.hook != found.hook) {
    out.push_back({where + ", hook", expected.hook ? to_string(*expected.hook) : "none",
                   found.hook ? to_string(*found.hook) : "none"});
  }
  const std::size_t count = std::max(expected.rules.size(), found.rules.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::string place = where + ", rule " + std::to_string(i + 1);
    if (i >= found.rules.size()) {
      out.push_back({place, to_string(expected.rules[i]), ""});
    } else if (i >= expected.rules.size()) {
      out.push_back({place, "", to_string(found.rules[i])});
    } else if (!(expected.rules[i] == found.rules[i])) {
      out.push_back({place, to_string(expected.rules[i]), to_string(found.rules[i])});
    }
  }
}

void compare(const std::string& where, const Set& expected, const Set& found,
             std::vector<Difference>& out) {
  if (expected.flags != found.flags || expected.key_length != found.key_length ||
      expected.fields != found.fields) {
    const auto shape = [](const Set& set) {
      return "flags " + std::to_string(set.flags) + " key " + std::to_string(set.key_length);
    };
    out.push_back({where + ", definition", shape(expected), shape(found)});
  }
  std::vector<Element> missing;
  std::vector<Element> extra;
  std::set_difference(expected.elements.begin(), expected.elements.end(), found.elements.begin(),
                      found.elements.end(), std::back_inserter(missing));
  std::set_difference(found.elements.begin(), found.elements.end(), expected.elements.begin(),
                      expected.elements.end(), std::back_inserter(extra));
  for (const auto& element : missing) out.push_back({where + ", element", to_string(element), ""});
  for (const auto& element : extra) out.push_back({where + ", element", "", to_string(element)});
}

namespace {
template <class Map>
void compare_maps(const std::string& where, const std::string& kind, const Map& expected,
                  const Map& found, std::vector<Difference>& out) {
  for (const auto& [name, value] : expected) {
    const auto other = found.find(name);
    const std::string place = where + ", " + kind + " " + name;
    if (other == found.end()) {
      out.push_back({place, "present", ""});
    } else {
      compare(place, value, other->second, out);
    }
  }
  for (const auto& [name, value] : found) {
    if (expected.count(name) == 0) out.push_back({where + ", " + kind + " " + name, "", "present"});
  }
}
}  // namespace

void compare(const std::string& where, const Table& expected, const Table& found,
             std::vector<Difference>& out) {
  if (expected.flags != found.flags) {
    out.push_back({where + ", flags", std::to_string(expected.flags), std::to_string(found.flags)});
  }
  compare_maps(where, "chain", expected.chains, found.chains, out);
  compare_maps(where, "set", expected.sets, found.sets, out);
}

}  // namespace agentgate::netdriver::nft

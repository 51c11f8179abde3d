// SPDX-License-Identifier: GPL-2.0-or-later
//
// Policy files and stored resolutions. What parses must come back the same from its own effective
// form, must compile to normalised boxes, and must open nothing in the always-deny set but what
// "private" and the resolvers say.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "plugin/policy/policy.h"

using namespace agentgate;

namespace {

void must(bool condition) {
  if (!condition) std::abort();
}

template <class Address>
void check(const netdriver::PolicyFamily<Address>& family,
           const std::vector<AddressRange<Address>>& always,
           std::initializer_list<const char*> never) {
  for (const auto& box : family.allow) {
    for (const auto& range : always) {
      must(box.addresses.last < range.first || range.last < box.addresses.first);
    }
  }
  for (const auto& box : family.private_entries) {
    for (const char* text : never) {
      const Address address = Address::parse(text).value();
      must(address < box.addresses.first || box.addresses.last < address);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto resolution = policy::resolution_from_json(text)) {
    const auto again = policy::resolution_from_json(policy::to_json(*resolution));
    must(again && *again == *resolution);
  }
  const policy::ParseResult parsed = policy::parse(text, "fuzz", "fuzz.json");
  must(parsed.errors.size() <= 51);
  for (const auto& error : parsed.errors) must(error.find('\x1b') == std::string::npos);
  if (!parsed.errors.empty()) return 0;
  const auto compiled = policy::compile(parsed.policy, {}, {});
  must(netdriver::normalise(compiled.spec) == compiled.spec);
  check(compiled.spec.v4, netdriver::always_deny4(), {"127.0.0.1", "169.254.169.254", "224.0.0.1"});
  check(compiled.spec.v6, netdriver::always_deny6(),
        {"::1", "fe80::1", "fd00:ec2::254", "ff02::1"});
  const policy::ParseResult again =
      policy::parse(policy::to_json(parsed.policy), "fuzz", "fuzz.json");
  must(again.errors.empty());
  must(policy::compile(again.policy, {}, {}).spec == compiled.spec);
  return 0;
}

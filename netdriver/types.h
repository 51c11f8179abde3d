// SPDX-License-Identifier: GPL-2.0-or-later
//
// Value types of the network: addresses, prefixes, names, ports.
//
// Everything here is parsed once at the edge and compared with == afterwards; nothing below the
// edge handles an address as a string. The types own their bytes, are cheap to copy, and are
// totally ordered so that they can be keys. Address bytes are in network order, port numbers and
// prefix lengths are host integers. All functions are pure and may be called from any thread.
//
// parse() accepts canonical text only (RFC 5952 for IPv6, no leading zeros in IPv4, no host bits
// below a prefix) and says in the error what the canonical form would be: an address that two
// tools read differently has no place in a policy.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "netdriver/error.h"

namespace agentgate {

enum class Family : std::uint8_t { ipv4, ipv6 };

class MacAddress {
 public:
  constexpr MacAddress() = default;
  explicit constexpr MacAddress(std::array<std::uint8_t, 6> bytes) : bytes_(bytes) {}

  // Six colon-separated pairs of hex digits, either case.
  static Result<MacAddress> parse(std::string_view text);

  [[nodiscard]] const std::array<std::uint8_t, 6>& bytes() const { return bytes_; }
  [[nodiscard]] bool is_zero() const { return bytes_ == std::array<std::uint8_t, 6>{}; }
  [[nodiscard]] bool is_multicast() const { return (bytes_[0] & 0x01U) != 0; }
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const MacAddress&) const = default;

 private:
  std::array<std::uint8_t, 6> bytes_{};
};

class Ipv4Address {
 public:
  constexpr Ipv4Address() = default;
  explicit constexpr Ipv4Address(std::array<std::uint8_t, 4> bytes) : bytes_(bytes) {}
  static constexpr Family family = Family::ipv4;
  static constexpr unsigned bits = 32;

  static Result<Ipv4Address> parse(std::string_view text);

  [[nodiscard]] const std::array<std::uint8_t, 4>& bytes() const { return bytes_; }
  [[nodiscard]] bool is_unspecified() const { return bytes_ == std::array<std::uint8_t, 4>{}; }
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const Ipv4Address&) const = default;

 private:
  std::array<std::uint8_t, 4> bytes_{};
};

class Ipv6Address {
 public:
  constexpr Ipv6Address() = default;
  explicit constexpr Ipv6Address(std::array<std::uint8_t, 16> bytes) : bytes_(bytes) {}
  static constexpr Family family = Family::ipv6;
  static constexpr unsigned bits = 128;

  static Result<Ipv6Address> parse(std::string_view text);

  [[nodiscard]] const std::array<std::uint8_t, 16>& bytes() const { return bytes_; }
  [[nodiscard]] bool is_unspecified() const { return bytes_ == std::array<std::uint8_t, 16>{}; }
  // An IPv4 address in IPv6 clothes (::ffff:a.b.c.d): never what a policy means.
  [[nodiscard]] bool is_v4_mapped() const;
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const Ipv6Address&) const = default;

 private:
  std::array<std::uint8_t, 16> bytes_{};
};

class IpAddress {
 public:
  IpAddress() = default;
  IpAddress(Ipv4Address address) : value_(address) {}  // NOLINT(google-explicit-constructor)
  IpAddress(Ipv6Address address) : value_(address) {}  // NOLINT(google-explicit-constructor)

  static Result<IpAddress> parse(std::string_view text);
  // 4 or 16 bytes in network order; any other length is an error.
  static Result<IpAddress> from_bytes(std::span<const std::uint8_t> bytes);

  [[nodiscard]] Family family() const { return is_v4() ? Family::ipv4 : Family::ipv6; }
  [[nodiscard]] bool is_v4() const { return std::holds_alternative<Ipv4Address>(value_); }
  [[nodiscard]] bool is_v6() const { return !is_v4(); }
  [[nodiscard]] const Ipv4Address& v4() const { return std::get<Ipv4Address>(value_); }
  [[nodiscard]] const Ipv6Address& v6() const { return std::get<Ipv6Address>(value_); }
  [[nodiscard]] std::span<const std::uint8_t> bytes() const;
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const IpAddress&) const = default;

 private:
  std::variant<Ipv4Address, Ipv6Address> value_;
};

// An inclusive range of addresses of one family, first <= last.
template <class Address>
struct AddressRange {
  Address first;
  Address last;
  auto operator<=>(const AddressRange&) const = default;
};
using Ipv4Range = AddressRange<Ipv4Address>;
using Ipv6Range = AddressRange<Ipv6Address>;

// A network prefix without host bits, e.g. 192.0.2.0/24.
template <class Address>
class BasicPrefix {
 public:
  BasicPrefix() = default;
  // Host bits below `length` are cleared. length is at most Address::bits.
  BasicPrefix(Address address, std::uint8_t length);

  // "a.b.c.d/n" or a bare address (then /32 or /128). Host bits set are an error.
  static Result<BasicPrefix> parse(std::string_view text);

  [[nodiscard]] const Address& address() const { return address_; }
  [[nodiscard]] std::uint8_t length() const { return length_; }
  [[nodiscard]] Address first() const { return address_; }
  [[nodiscard]] Address last() const;
  [[nodiscard]] AddressRange<Address> range() const { return {first(), last()}; }
  [[nodiscard]] bool contains(const Address& address) const;
  [[nodiscard]] bool overlaps(const BasicPrefix& other) const;
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const BasicPrefix&) const = default;

 private:
  Address address_{};
  std::uint8_t length_ = 0;
};
using Ipv4Prefix = BasicPrefix<Ipv4Address>;
using Ipv6Prefix = BasicPrefix<Ipv6Address>;

// An interface's own address with the length of its on-link prefix, e.g. 192.0.2.1/24.
template <class Address>
struct BasicInterfaceAddress {
  Address address;
  std::uint8_t length = 0;

  static Result<BasicInterfaceAddress> parse(std::string_view text);
  [[nodiscard]] BasicPrefix<Address> prefix() const { return {address, length}; }
  [[nodiscard]] std::string to_string() const;

  auto operator<=>(const BasicInterfaceAddress&) const = default;
};
using Ipv4InterfaceAddress = BasicInterfaceAddress<Ipv4Address>;
using Ipv6InterfaceAddress = BasicInterfaceAddress<Ipv6Address>;

enum class Protocol : std::uint8_t { tcp = 6, udp = 17 };  // IANA protocol numbers

[[nodiscard]] std::string_view to_string(Protocol protocol);

// An inclusive range of transport ports, 1..65535, first <= last.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
  [[nodiscard]] bool single() const { return first == last; }
  auto operator<=>(const PortRange&) const = default;
};

// "tcp/443", "udp/443", "tcp/8000-8100".
struct Service {
  Protocol protocol = Protocol::tcp;
  PortRange ports;

  static Result<Service> parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;
  auto operator<=>(const Service&) const = default;
};

// A kernel interface name: 1 to 15 bytes, no '/', no white space, not "." or ".."
// (dev_valid_name in net/core/dev.c); '%' is refused too, since RTM_NEWLINK expands it.
class InterfaceName {
 public:
  InterfaceName() = default;
  static Result<InterfaceName> parse(std::string_view text);

  [[nodiscard]] const std::string& str() const { return name_; }
  [[nodiscard]] bool empty() const { return name_.empty(); }
  auto operator<=>(const InterfaceName&) const = default;

 private:
  explicit InterfaceName(std::string name) : name_(std::move(name)) {}
  std::string name_;
};

// Merges overlapping and adjacent ranges; the result is sorted and disjoint.
template <class Address>
[[nodiscard]] std::vector<AddressRange<Address>> merge(std::vector<AddressRange<Address>> ranges);

// The address after `address`; nothing after the last one.
template <class Address>
[[nodiscard]] std::optional<Address> next(const Address& address);

}  // namespace agentgate

// SPDX-License-Identifier: GPL-2.0-or-later
#include "netdriver/types.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <charconv>
#include <cstring>

namespace agentgate {
namespace {

constexpr char kHex[] = "0123456789abcdef";

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

// Decimal without sign, white space or leading zeros.
std::optional<unsigned> decimal(std::string_view text, unsigned max) {
  if (text.empty() || (text.size() > 1 && text[0] == '0')) return std::nullopt;
  unsigned value = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc{} || end != text.data() + text.size() || value > max) return std::nullopt;
  return value;
}

template <class Address>
Result<Address> parse_address(std::string_view text, int af, const char* what) {
  std::array<std::uint8_t, Address::bits / 8> bytes{};
  const std::string copy(text);
  if (copy.size() != std::strlen(copy.c_str()) ||
      ::inet_pton(af, copy.c_str(), bytes.data()) != 1) {
    return fail("parse", quoted(text) + " is not " + what);
  }
  const Address address(bytes);
  if (const std::string canonical = address.to_string(); canonical != text) {
    return fail("parse", quoted(text) + " is not written canonically, write " + quoted(canonical));
  }
  return address;
}

template <class Address>
void clear_host_bits(std::array<std::uint8_t, Address::bits / 8>& bytes, unsigned length) {
  for (unsigned i = 0; i < bytes.size(); ++i) {
    const unsigned keep = length > i * 8 ? std::min(length - i * 8, 8U) : 0;
    bytes[i] = static_cast<std::uint8_t>(bytes[i] & (0xFF00U >> keep));
  }
}

template <class Address>
struct AddressAndLength {
  Address address;
  std::uint8_t length;
};

template <class Address>
Result<AddressAndLength<Address>> parse_with_length(std::string_view text, bool length_required) {
  const auto slash = text.find('/');
  auto address = Address::parse(text.substr(0, slash));
  if (!address) return tl::unexpected(address.error());
  if (slash == std::string_view::npos) {
    if (length_required) return fail("parse", quoted(text) + " lacks a prefix length (/N)");
    return AddressAndLength<Address>{*address, static_cast<std::uint8_t>(Address::bits)};
  }
  const auto length = decimal(text.substr(slash + 1), Address::bits);
  if (!length) {
    return fail("parse", quoted(text) + " has no prefix length between 0 and " +
                             std::to_string(Address::bits));
  }
  return AddressAndLength<Address>{*address, static_cast<std::uint8_t>(*length)};
}

}  // namespace

Result<MacAddress> MacAddress::parse(std::string_view text) {
  std::array<std::uint8_t, 6> bytes{};
  bool good = text.size() == 17;
  for (std::size_t i = 0; good && i < 6; ++i) {
    const int high = hex_value(text[i * 3]);
    const int low = hex_value(text[i * 3 + 1]);
    good = high >= 0 && low >= 0 && (i == 5 || text[i * 3 + 2] == ':');
    if (good) bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  if (!good) return fail("parse", quoted(text) + " is not a MAC address (aa:bb:cc:dd:ee:ff)");
  return MacAddress(bytes);
}

std::string MacAddress::to_string() const {
  std::string out;
  for (const std::uint8_t byte : bytes_) {
    if (!out.empty()) out += ':';
    out += kHex[byte >> 4];
    out += kHex[byte & 0xF];
  }
  return out;
}

Result<Ipv4Address> Ipv4Address::parse(std::string_view text) {
  return parse_address<Ipv4Address>(text, AF_INET, "an IPv4 address");
}

std::string Ipv4Address::to_string() const {
  char text[INET_ADDRSTRLEN];
  return ::inet_ntop(AF_INET, bytes_.data(), text, sizeof text);
}

Result<Ipv6Address> Ipv6Address::parse(std::string_view text) {
  return parse_address<Ipv6Address>(text, AF_INET6, "an IPv6 address");
}

std::string Ipv6Address::to_string() const {
  char text[INET6_ADDRSTRLEN];
  return ::inet_ntop(AF_INET6, bytes_.data(), text, sizeof text);
}

bool Ipv6Address::is_v4_mapped() const {
  return std::all_of(bytes_.begin(), bytes_.begin() + 10, [](auto b) { return b == 0; }) &&
         bytes_[10] == 0xFF && bytes_[11] == 0xFF;
}

Result<IpAddress> IpAddress::parse(std::string_view text) {
  if (text.find(':') != std::string_view::npos) {
    auto v6 = Ipv6Address::parse(text);
    if (!v6) return tl::unexpected(v6.error());
    return IpAddress(*v6);
  }
  auto v4 = Ipv4Address::parse(text);
  if (!v4) return fail("parse", quoted(text) + " is not an IPv4 or IPv6 address");
  return IpAddress(*v4);
}

Result<IpAddress> IpAddress::from_bytes(std::span<const std::uint8_t> bytes) {
  if (bytes.size() == 4) {
    std::array<std::uint8_t, 4> raw{};
    std::copy(bytes.begin(), bytes.end(), raw.begin());
    return IpAddress(Ipv4Address(raw));
  }
  if (bytes.size() == 16) {
    std::array<std::uint8_t, 16> raw{};
    std::copy(bytes.begin(), bytes.end(), raw.begin());
    return IpAddress(Ipv6Address(raw));
  }
  return fail("parse", "an address of " + std::to_string(bytes.size()) + " bytes");
}

std::span<const std::uint8_t> IpAddress::bytes() const {
  if (is_v4()) return v4().bytes();
  return v6().bytes();
}

std::string IpAddress::to_string() const { return is_v4() ? v4().to_string() : v6().to_string(); }

template <class Address>
BasicPrefix<Address>::BasicPrefix(Address address, std::uint8_t length)
    : length_(std::min<std::uint8_t>(length, Address::bits)) {
  auto bytes = address.bytes();
  clear_host_bits<Address>(bytes, length_);
  address_ = Address(bytes);
}

template <class Address>
Result<BasicPrefix<Address>> BasicPrefix<Address>::parse(std::string_view text) {
  auto parsed = parse_with_length<Address>(text, false);
  if (!parsed) return tl::unexpected(parsed.error());
  const BasicPrefix prefix(parsed->address, parsed->length);
  if (prefix.address() != parsed->address) {
    return fail("parse", quoted(text) + " has bits set below its prefix length, write " +
                             quoted(prefix.to_string()));
  }
  return prefix;
}

template <class Address>
Address BasicPrefix<Address>::last() const {
  auto bytes = address_.bytes();
  auto mask = bytes;
  mask.fill(0xFF);
  clear_host_bits<Address>(mask, length_);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(bytes[i] | static_cast<std::uint8_t>(~mask[i]));
  }
  return Address(bytes);
}

template <class Address>
bool BasicPrefix<Address>::contains(const Address& address) const {
  return first() <= address && address <= last();
}

template <class Address>
bool BasicPrefix<Address>::overlaps(const BasicPrefix& other) const {
  return first() <= other.last() && other.first() <= last();
}

template <class Address>
std::string BasicPrefix<Address>::to_string() const {
  return address_.to_string() + "/" + std::to_string(length_);
}

template <class Address>
Result<BasicInterfaceAddress<Address>> BasicInterfaceAddress<Address>::parse(
    std::string_view text) {
  auto parsed = parse_with_length<Address>(text, true);
  if (!parsed) return tl::unexpected(parsed.error());
  return BasicInterfaceAddress{parsed->address, parsed->length};
}

template <class Address>
std::string BasicInterfaceAddress<Address>::to_string() const {
  return address.to_string() + "/" + std::to_string(length);
}

std::string_view to_string(Protocol protocol) { return protocol == Protocol::tcp ? "tcp" : "udp"; }

Result<Service> Service::parse(std::string_view text) {
  const auto bad = [&](const char* why) {
    return fail("parse", quoted(text) + " " + why +
                             "; write PROTOCOL/PORT, for example tcp/443, udp/53 or tcp/8000-8100");
  };
  const auto slash = text.find('/');
  if (slash == std::string_view::npos) return bad("has no protocol");
  Service service;
  const auto protocol = text.substr(0, slash);
  if (protocol == "tcp") {
    service.protocol = Protocol::tcp;
  } else if (protocol == "udp") {
    service.protocol = Protocol::udp;
  } else {
    return bad("names a protocol other than tcp and udp");
  }
  const auto ports = text.substr(slash + 1);
  const auto dash = ports.find('-');
  const auto first = decimal(ports.substr(0, dash), 65535);
  const auto last = dash == std::string_view::npos ? first : decimal(ports.substr(dash + 1), 65535);
  if (!first || !last || *first == 0) return bad("has no port between 1 and 65535");
  if (*first > *last) return bad("has a port range that ends before it begins");
  service.ports = {static_cast<std::uint16_t>(*first), static_cast<std::uint16_t>(*last)};
  return service;
}

std::string Service::to_string() const {
  std::string out(agentgate::to_string(protocol));
  out += '/' + std::to_string(ports.first);
  if (!ports.single()) out += '-' + std::to_string(ports.last);
  return out;
}

Result<InterfaceName> InterfaceName::parse(std::string_view text) {
  const bool good = !text.empty() && text.size() < IFNAMSIZ && text != "." && text != ".." &&
                    std::all_of(text.begin(), text.end(), [](unsigned char c) {
                      return c > 0x20 && c != 0x7F && c != '/' && c != ':' && c != '%';
                    });
  if (!good) return fail("parse", quoted(text) + " is not an interface name");
  return InterfaceName(std::string(text));
}

template <class Address>
std::optional<Address> next(const Address& address) {
  auto bytes = address.bytes();
  for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
    if (++*byte != 0) return Address(bytes);
  }
  return std::nullopt;
}

template <class Address>
std::vector<AddressRange<Address>> merge(std::vector<AddressRange<Address>> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::vector<AddressRange<Address>> out;
  for (const auto& range : ranges) {
    if (!out.empty()) {
      const auto after = next(out.back().last);
      if (!after || range.first <= *after) {
        out.back().last = std::max(out.back().last, range.last);
        continue;
      }
    }
    out.push_back(range);
  }
  return out;
}

template class BasicPrefix<Ipv4Address>;
template class BasicPrefix<Ipv6Address>;
template struct BasicInterfaceAddress<Ipv4Address>;
template struct BasicInterfaceAddress<Ipv6Address>;
template std::optional<Ipv4Address> next(const Ipv4Address&);
template std::optional<Ipv6Address> next(const Ipv6Address&);
template std::vector<Ipv4Range> merge(std::vector<Ipv4Range>);
template std::vector<Ipv6Range> merge(std::vector<Ipv6Range>);

}  // namespace agentgate

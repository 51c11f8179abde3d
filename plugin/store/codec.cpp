// SPDX-License-Identifier: GPL-2.0-or-later
#include <algorithm>

#include <nlohmann/json.hpp>

#include "plugin/store/store.h"

namespace agentgate::store {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxPid = 1 << 22;  // PID_MAX_LIMIT, include/linux/threads.h

// Reads the fields of one object and notices what is missing, wrong or left over.
class Fields {
 public:
  Fields(std::string_view text, const char* what) : what_(what) {
    object_ = json::parse(text, nullptr, false);
    if (!object_.is_object()) {
      problem("is not a JSON object");
    } else if (number("version") != 1) {
      problem("has no \"version\": 1");
    }
  }
  explicit Fields(json object, const char* what) : what_(what), object_(std::move(object)) {
    if (!object_.is_object()) problem("is not an object");
  }

  std::string text(const char* key) {
    const json* value = take(key, &json::is_string);
    return value == nullptr ? std::string() : value->get<std::string>();
  }
  std::uint64_t number(const char* key) {
    const json* value = take(key, &json::is_number_unsigned);
    return value == nullptr ? 0 : value->get<std::uint64_t>();
  }
  bool flag(const char* key) {
    const json* value = take(key, &json::is_boolean);
    return value != nullptr && value->get<bool>();
  }
  // null or absent: nothing.
  template <class T>
  std::optional<T> optional(const char* key) {
    used_.push_back(key);
    if (bad() || !object_.contains(key) || object_[key].is_null()) return std::nullopt;
    if (!object_[key].is_string()) {
      problem(std::string("\"") + key + "\" is not a string");
      return std::nullopt;
    }
    auto parsed = T::parse(object_[key].template get<std::string>());
    if (!parsed) {
      problem(std::string("\"") + key + "\": " + parsed.error().text);
      return std::nullopt;
    }
    return *parsed;
  }
  template <class T>
  T required(const char* key) {
    const std::string value = text(key);
    if (bad()) return T();
    auto parsed = T::parse(value);
    if (!parsed) {
      problem(std::string("\"") + key + "\": " + parsed.error().text);
      return T();
    }
    return *parsed;
  }
  std::vector<std::string> texts(const char* key) {
    const json* value = take(key, &json::is_array);
    std::vector<std::string> out;
    if (value == nullptr) return out;
    for (const json& entry : *value) {
      if (!entry.is_string()) {
        problem(std::string("\"") + key + "\" has an entry that is not a string");
        return {};
      }
      out.push_back(entry.get<std::string>());
    }
    return out;
  }
  std::optional<json> object(const char* key) {
    used_.push_back(key);
    if (bad() || !object_.contains(key) || object_[key].is_null()) return std::nullopt;
    return object_[key];
  }
  void problem(const std::string& text) {
    if (problem_.empty()) problem_ = text;
  }
  [[nodiscard]] bool bad() const { return !problem_.empty(); }
  Status finish() {
    if (!bad()) {
      for (const auto& [key, value] : object_.items()) {
        if (std::find(used_.begin(), used_.end(), key) == used_.end()) {
          problem("has the unknown key \"" + key + "\"");
        }
      }
    }
    if (bad()) return fail(what_, problem_, EBADMSG);
    return {};
  }

 private:
  const json* take(const char* key, bool (json::*is)() const noexcept) {
    used_.push_back(key);
    if (bad()) return nullptr;
    const auto found = object_.find(key);
    if (found == object_.end() || !((*found).*is)()) {
      problem(std::string("\"") + key + "\" is missing or of the wrong type");
      return nullptr;
    }
    return &*found;
  }

  std::string what_;
  json object_;
  std::vector<std::string> used_;
  std::string problem_;
};

template <class T>
json optional_text(const std::optional<T>& value) {
  return value ? json(value->to_string()) : json();
}

template <class Address>
std::string range_text(const AddressRange<Address>& range) {
  return range.first.to_string() + "-" + range.last.to_string();
}

template <class Address>
std::string entry_text(const netdriver::AllowEntry<Address>& entry) {
  return range_text(entry.addresses) + " " + Service{entry.protocol, entry.ports}.to_string();
}

template <class Address>
std::optional<AddressRange<Address>> parse_range(const std::string& text) {
  const std::size_t dash = text.find('-');
  if (dash == std::string::npos) return std::nullopt;
  const auto first = Address::parse(text.substr(0, dash));
  const auto last = Address::parse(text.substr(dash + 1));
  if (!first || !last || *last < *first) return std::nullopt;
  return AddressRange<Address>{*first, *last};
}

template <class Address>
std::optional<netdriver::AllowEntry<Address>> parse_entry(const std::string& text) {
  const std::size_t space = text.find(' ');
  if (space == std::string::npos) return std::nullopt;
  const auto range = parse_range<Address>(text.substr(0, space));
  const auto service = Service::parse(text.substr(space + 1));
  if (!range || !service) return std::nullopt;
  return netdriver::AllowEntry<Address>{*range, service->protocol, service->ports};
}

template <class Address>
json encode_family(const netdriver::PolicyFamily<Address>& family) {
  json out = {{"deny", json::array()}, {"private", json::array()}, {"allow", json::array()}};
  for (const auto& range : family.deny) out["deny"].push_back(range_text(range));
  for (const auto& entry : family.private_entries) out["private"].push_back(entry_text(entry));
  for (const auto& entry : family.allow) out["allow"].push_back(entry_text(entry));
  return out;
}

template <class Address>
void decode_family(Fields& outer, const char* key, netdriver::PolicyFamily<Address>& out) {
  const auto object = outer.object(key);
  if (!object) return outer.problem(std::string("\"") + key + "\" is missing");
  Fields fields(*object, key);
  for (const std::string& text : fields.texts("deny")) {
    const auto range = parse_range<Address>(text);
    if (!range) return outer.problem("\"" + text + "\" is no range of addresses");
    out.deny.push_back(*range);
  }
  const auto entries = [&](const char* list, std::vector<netdriver::AllowEntry<Address>>& into) {
    for (const std::string& text : fields.texts(list)) {
      const auto entry = parse_entry<Address>(text);
      if (!entry) return outer.problem("\"" + text + "\" is no range of addresses and a service");
      into.push_back(*entry);
    }
  };
  entries("private", out.private_entries);
  entries("allow", out.allow);
  if (const Status status = fields.finish(); !status) outer.problem(status.error().to_string());
}

}  // namespace

std::string encode(const NetworkRecord& network) {
  return json({{"version", 1},
               {"id", network.id.str()},
               {"gateway4", optional_text(network.gateway4)},
               {"gateway6", optional_text(network.gateway6)},
               {"policy", network.policy},
               {"mtu", network.mtu},
               {"masquerade", network.masquerade}})
      .dump(1, ' ', false, json::error_handler_t::replace);
}

Result<NetworkRecord> decode_network(std::string_view text) {
  Fields fields(text, "network file");
  NetworkRecord out;
  out.id = fields.required<NetworkId>("id");
  out.gateway4 = fields.optional<Ipv4InterfaceAddress>("gateway4");
  out.gateway6 = fields.optional<Ipv6InterfaceAddress>("gateway6");
  out.policy = fields.text("policy");
  if (!fields.bad() && !check_policy_name(out.policy)) fields.problem("\"policy\" is not a name");
  const std::uint64_t mtu = fields.number("mtu");
  if (!fields.bad() && (mtu < 68 || mtu > 65535)) fields.problem("\"mtu\" is out of range");
  out.mtu = static_cast<std::uint32_t>(mtu);
  out.masquerade = fields.flag("masquerade");
  if (!fields.bad() && !out.gateway4 && !out.gateway6) fields.problem("has no gateway");
  if (Status status = fields.finish(); !status) return tl::unexpected(status.error());
  return out;
}

std::string encode(const EndpointRecord& endpoint) {
  json release;
  if (endpoint.release) {
    release = {{"container_id", endpoint.release->container_id},
               {"container_name", endpoint.release->container_name},
               {"pid", static_cast<std::uint64_t>(endpoint.release->process.pid)},
               {"start_time", endpoint.release->process.start_time},
               {"policy", endpoint.release->policy},
               {"released_at", endpoint.release->released_at},
               {"committed", endpoint.release->committed}};
  }
  return json({{"version", 1},
               {"id", endpoint.id.str()},
               {"network", endpoint.network.str()},
               {"address4", optional_text(endpoint.address4)},
               {"address6", optional_text(endpoint.address6)},
               {"mac", endpoint.mac.to_string()},
               {"policy", endpoint.policy},
               {"sandbox_key", endpoint.sandbox_key},
               {"prepared", endpoint.prepared},
               {"release", release}})
      .dump(1, ' ', false, json::error_handler_t::replace);
}

Result<EndpointRecord> decode_endpoint(std::string_view text) {
  Fields fields(text, "endpoint file");
  EndpointRecord out;
  out.id = fields.required<EndpointId>("id");
  out.network = fields.required<NetworkId>("network");
  out.address4 = fields.optional<Ipv4Address>("address4");
  out.address6 = fields.optional<Ipv6Address>("address6");
  out.mac = fields.required<MacAddress>("mac");
  out.policy = fields.text("policy");
  if (!fields.bad() && !out.policy.empty() && !check_policy_name(out.policy)) {
    fields.problem("\"policy\" is not a name");
  }
  out.sandbox_key = fields.text("sandbox_key");
  out.prepared = fields.flag("prepared");
  if (const auto object = fields.object("release")) {
    Fields inner(*object, "endpoint file, \"release\"");
    Release release;
    release.container_id = inner.text("container_id");
    release.container_name = inner.text("container_name");
    const std::uint64_t pid = inner.number("pid");
    if (!inner.bad() && (pid == 0 || pid > kMaxPid)) inner.problem("\"pid\" is out of range");
    release.process.pid = static_cast<std::int64_t>(pid);
    release.process.start_time = inner.number("start_time");
    release.policy = inner.text("policy");
    if (!inner.bad() && !check_policy_name(release.policy))
      inner.problem("\"policy\" is not a name");
    release.released_at = inner.text("released_at");
    release.committed = inner.flag("committed");
    if (Status status = inner.finish(); !status) return tl::unexpected(status.error());
    out.release = std::move(release);
  }
  if (Status status = fields.finish(); !status) return tl::unexpected(status.error());
  return out;
}

std::string encode(const PolicyRecord& policy) {
  return json({{"version", 1},
               {"name", policy.spec.name},
               {"revision", policy.revision},
               {"reject", policy.spec.reject},
               {"v4", encode_family(policy.spec.v4)},
               {"v6", encode_family(policy.spec.v6)}})
      .dump(1, ' ', false, json::error_handler_t::replace);
}

Result<PolicyRecord> decode_policy(std::string_view text) {
  Fields fields(text, "released policy file");
  PolicyRecord out;
  out.spec.name = fields.text("name");
  if (!fields.bad() && !check_policy_name(out.spec.name)) fields.problem("\"name\" is not a name");
  out.revision = fields.text("revision");
  out.spec.reject = fields.flag("reject");
  decode_family(fields, "v4", out.spec.v4);
  decode_family(fields, "v6", out.spec.v6);
  if (Status status = fields.finish(); !status) return tl::unexpected(status.error());
  if (netdriver::normalise(out.spec) != out.spec) {
    return fail("released policy file", "its entries are not in canonical form", EBADMSG);
  }
  return out;
}

}  // namespace agentgate::store

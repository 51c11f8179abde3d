// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/store/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

namespace agentgate::store {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kNetworkId(64, 'a');
const std::string kEndpointId(64, 'b');

NetworkRecord network_record(const std::string& id = kNetworkId) {
  NetworkRecord out;
  out.id = NetworkId::parse(id).value();
  out.gateway4 = Ipv4InterfaceAddress::parse("10.99.0.1/24").value();
  out.gateway6 = Ipv6InterfaceAddress::parse("fd99::1/64").value();
  out.policy = "web";
  out.mtu = 1450;
  out.masquerade = false;
  return out;
}

EndpointRecord endpoint_record(const std::string& id = kEndpointId) {
  EndpointRecord out;
  out.id = EndpointId::parse(id).value();
  out.network = NetworkId::parse(kNetworkId).value();
  out.address4 = Ipv4Address::parse("10.99.0.2").value();
  out.address6 = Ipv6Address::parse("fd99::2").value();
  out.mac = MacAddress::parse("02:00:00:00:00:01").value();
  out.policy = "web";
  out.sandbox_key = "/var/run/docker/netns/0123456789ab";
  out.prepared = true;
  out.release =
      Release{std::string(64, 'c'), "a1", {4242, 987654321}, "web", "2026-01-02T03:04:05.678Z"};
  return out;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

std::size_t files_in(const fs::path& directory) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
}

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/agentgate-store-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    base_ = name;
    directory_ = base_ / "state";
  }
  void TearDown() override { fs::remove_all(base_); }

  std::unique_ptr<Store> open() {
    auto opened = Store::open(directory_);
    EXPECT_TRUE(opened) << opened.error().to_string();
    return opened ? std::move(*opened) : nullptr;
  }
  [[nodiscard]] fs::path network_file() const {
    return directory_ / "networks" / (kNetworkId + ".json");
  }
  [[nodiscard]] fs::path endpoint_file() const {
    return directory_ / "endpoints" / (kEndpointId + ".json");
  }

  fs::path base_;
  fs::path directory_;
};

TEST(StoreCodec, DecodeEncodeIsTheSame) {
  const NetworkRecord network = network_record();
  EXPECT_EQ(decode_network(encode(network)).value(), network);
  NetworkRecord only_v6 = network;
  only_v6.gateway4.reset();
  EXPECT_EQ(decode_network(encode(only_v6)).value(), only_v6);

  EndpointRecord endpoint = endpoint_record();
  EXPECT_EQ(decode_endpoint(encode(endpoint)).value(), endpoint);
  endpoint.release->committed = true;
  EXPECT_EQ(decode_endpoint(encode(endpoint)).value(), endpoint);
  endpoint.release.reset();
  endpoint.policy.clear();
  endpoint.sandbox_key.clear();
  endpoint.address6.reset();
  endpoint.prepared = false;
  EXPECT_EQ(decode_endpoint(encode(endpoint)).value(), endpoint);
}

PolicyRecord policy_record() {
  netdriver::PolicySpec spec;
  spec.name = "web";
  spec.reject = false;
  const auto v4 = [](const char* a, const char* b) {
    return Ipv4Range{Ipv4Address::parse(a).value(), Ipv4Address::parse(b).value()};
  };
  const auto one = Ipv6Address::parse("2001:db8::80").value();
  spec.v4.deny = {v4("203.0.113.7", "203.0.113.9")};
  spec.v4.private_entries = {{v4("10.0.0.5", "10.0.0.5"), Protocol::tcp, {5432, 5432}}};
  spec.v4.allow = {{v4("192.0.2.0", "192.0.2.255"), Protocol::udp, {8000, 8100}}};
  spec.v6.allow = {{{one, one}, Protocol::tcp, {443, 443}}};
  return {netdriver::normalise(spec), "0123456789ab"};
}

TEST(StoreCodec, APolicyIsKeptExactly) {
  EXPECT_EQ(decode_policy(encode(policy_record())).value(), policy_record());
}

TEST(StoreCodec, ADamagedPolicyIsRefused) {
  const std::string text = encode(policy_record());
  for (std::size_t length = 0; length < text.size(); ++length) {
    ASSERT_FALSE(decode_policy(text.substr(0, length))) << length;
  }
  const auto with = [](const char* path, const json& value) {
    json root = json::parse(encode(policy_record()));
    root[json::json_pointer(path)] = value;
    return root.dump();
  };
  EXPECT_TRUE(decode_policy(with("/v4/deny/0", "203.0.113.7-203.0.113.9")));
  for (const char* bad :
       {"", "203.0.113.7", "203.0.113.9-203.0.113.7", "2001:db8::1-2001:db8::2"}) {
    EXPECT_FALSE(decode_policy(with("/v4/deny/0", bad))) << bad;
  }
  for (const char* bad : {"192.0.2.0-192.0.2.255", "192.0.2.0-192.0.2.255 tcp/0", "tcp/443"}) {
    EXPECT_FALSE(decode_policy(with("/v4/allow/0", bad))) << bad;
  }
  EXPECT_FALSE(decode_policy(with("/v4/more", json::array())));
  EXPECT_FALSE(decode_policy(with("/v6", json())));
  EXPECT_FALSE(decode_policy(with("/v4/allow/0", 1)));
  EXPECT_FALSE(decode_policy(with("/name", "../web")));
  // Two entries that overlap: not what normalise() makes, so nothing of ours wrote it.
  EXPECT_FALSE(decode_policy(with("/v4/deny/1", "203.0.113.8-203.0.113.20")));
}

TEST(StoreCodec, KeepsAnyName) {
  EndpointRecord endpoint = endpoint_record();
  endpoint.release->container_name = "a \"quoted\"\nname \xc3\xa4";
  endpoint.release->process = {1 << 22, UINT64_MAX};
  EXPECT_EQ(decode_endpoint(encode(endpoint)).value(), endpoint);
}

TEST(StoreCodec, EveryTruncationIsDamage) {
  const std::string network = encode(network_record());
  for (std::size_t length = 0; length < network.size(); ++length) {
    const auto decoded = decode_network(network.substr(0, length));
    ASSERT_FALSE(decoded) << length;
    EXPECT_EQ(decoded.error().code, EBADMSG);
  }
  const std::string endpoint = encode(endpoint_record());
  for (std::size_t length = 0; length < endpoint.size(); ++length) {
    ASSERT_FALSE(decode_endpoint(endpoint.substr(0, length))) << length;
  }
}

// Every field, with every value of a wrong kind, by itself.
TEST(StoreCodec, WrongTypesAreDamageAndNamed) {
  const json wrong = {json(), true, 1, -1, 1.5, "", "x", json::array(), json::object()};
  const auto acceptable = [](const std::string& key, const json& value) {
    if (key == "gateway4" || key == "gateway6" || key == "address4" || key == "address6" ||
        key == "release") {
      return value.is_null();
    }
    if (key == "masquerade" || key == "prepared" || key == "committed") return value.is_boolean();
    if (key == "sandbox_key" || key == "container_id" || key == "container_name" ||
        key == "released_at") {
      return value.is_string();
    }
    if (key == "start_time" || key == "pid" || key == "version") {
      return value == 1;
    }
    if (key == "policy") return value == "x";
    return false;
  };
  const auto try_all = [&](const json& good, const json::json_pointer& at, const auto& decode) {
    for (const auto& [key, unused] : good[at].items()) {
      for (const json& value : wrong) {
        json bad = good;
        bad[at][key] = value;
        const auto decoded = decode(bad.dump());
        const bool endpoint_policy = key == "policy" && value == "" && good.contains("mac") &&
                                     at.empty();  // empty: the network's
        if (acceptable(key, value) || endpoint_policy) {
          EXPECT_TRUE(decoded) << key << " = " << value << ": " << decoded.error().to_string();
        } else {
          ASSERT_FALSE(decoded) << key << " = " << value;
          EXPECT_NE(decoded.error().to_string().find("\"" + key + "\""), std::string::npos)
              << decoded.error().to_string();
        }
      }
      json bad = good;
      bad[at].erase(key);
      const auto decoded = decode(bad.dump());
      EXPECT_EQ(static_cast<bool>(decoded), acceptable(key, json())) << key << " missing";
    }
    json bad = good;
    bad[at]["extra"] = 1;
    const auto decoded = decode(bad.dump());
    ASSERT_FALSE(decoded);
    EXPECT_NE(decoded.error().text.find("\"extra\""), std::string::npos);
  };
  // Without IPv6 the other gateway must be there.
  NetworkRecord network = network_record();
  try_all(json::parse(encode(network)), json::json_pointer(""), decode_network);
  const json endpoint = json::parse(encode(endpoint_record()));
  try_all(endpoint, json::json_pointer(""), decode_endpoint);
  try_all(endpoint, json::json_pointer("/release"), decode_endpoint);
}

TEST(StoreCodec, RefusesValuesOutOfRange) {
  const auto network_with = [](const char* key, const json& value) {
    json root = json::parse(encode(network_record()));
    root[key] = value;
    return decode_network(root.dump());
  };
  EXPECT_FALSE(network_with("version", 2));
  EXPECT_FALSE(network_with("version", "1"));
  EXPECT_FALSE(network_with("mtu", 67));
  EXPECT_TRUE(network_with("mtu", 68));
  EXPECT_FALSE(network_with("mtu", 65536));
  EXPECT_FALSE(network_with("mtu", 4294968796));  // 1500 modulo 2^32
  EXPECT_FALSE(network_with("id", "../../../etc/passwd"));
  EXPECT_FALSE(network_with("policy", "../web"));
  EXPECT_FALSE(network_with("gateway4", "10.99.0.1/33"));
  EXPECT_FALSE(network_with("gateway4", "10.99.00.1/24"));
  json neither = json::parse(encode(network_record()));
  neither["gateway4"] = neither["gateway6"] = json();
  EXPECT_FALSE(decode_network(neither.dump()));

  json endpoint = json::parse(encode(endpoint_record()));
  endpoint["release"]["pid"] = 0;
  EXPECT_FALSE(decode_endpoint(endpoint.dump()));
  endpoint["release"]["pid"] = 18446744073709551615ULL;
  EXPECT_FALSE(decode_endpoint(endpoint.dump()));
}

TEST_F(StoreTest, WhatIsSavedIsLoaded) {
  {
    const auto store = open();
    ASSERT_TRUE(store->save(network_record()));
    ASSERT_TRUE(store->save(endpoint_record()));
    ASSERT_TRUE(store->save_resolution("web", R"({"version":1,"names":{}})"));
    ASSERT_TRUE(store->save(policy_record()));
  }
  const auto store = open();
  const auto contents = store->load();
  ASSERT_TRUE(contents) << contents.error().to_string();
  EXPECT_EQ(contents->networks.at(network_record().id), network_record());
  EXPECT_EQ(contents->endpoints.at(endpoint_record().id), endpoint_record());
  EXPECT_EQ(contents->resolutions.at("web"), R"({"version":1,"names":{}})");
  EXPECT_EQ(contents->released.at("web"), policy_record());
  EXPECT_TRUE(contents->damaged.empty());
}

TEST_F(StoreTest, DirectoriesAndFilesAreForRootAlone) {
  const auto store = open();
  ASSERT_TRUE(store->save(network_record()));
  for (const char* folder : {"", "networks", "endpoints", "policies", "damaged"}) {
    struct stat status {};
    ASSERT_EQ(::stat((directory_ / folder).c_str(), &status), 0) << folder;
    EXPECT_EQ(status.st_mode & 07777, 0700U) << folder;
  }
  struct stat status {};
  ASSERT_EQ(::stat(network_file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
}

TEST_F(StoreTest, ATrailingSlashChangesNothing) {
  const auto opened = Store::open(directory_.string() + "/");
  ASSERT_TRUE(opened);
  struct stat status {};
  ASSERT_EQ(::stat(directory_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700U);
}

TEST_F(StoreTest, RefusesADirectoryThatOthersCanWrite) {
  fs::create_directory(directory_);
  ::chmod(directory_.c_str(), 0770);
  const auto refused = Store::open(directory_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPERM);
  EXPECT_NE(refused.error().text.find("chmod go-w " + directory_.string()), std::string::npos);
  ::chmod(directory_.c_str(), 0750);
  EXPECT_TRUE(Store::open(directory_));
}

TEST_F(StoreTest, RefusesADirectoryOfAnother) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a directory away";
  fs::create_directory(directory_);
  ASSERT_EQ(::chown(directory_.c_str(), 65534, 65534), 0);
  const auto refused = Store::open(directory_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, EPERM);
}

TEST_F(StoreTest, RefusesAFileInPlaceOfTheDirectory) {
  write(directory_, "");
  const auto refused = Store::open(directory_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ENOTDIR);
}

TEST_F(StoreTest, ASecondDaemonIsRefused) {
  const auto first = open();
  const auto second = Store::open(directory_);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, EWOULDBLOCK);
  EXPECT_NE(second.error().operation.find(directory_.string()), std::string::npos);
}

TEST_F(StoreTest, TheLockEndsWithTheStore) {
  open().reset();
  EXPECT_TRUE(Store::open(directory_));
}

TEST_F(StoreTest, RemovingTwiceIsFine) {
  const auto store = open();
  ASSERT_TRUE(store->save(network_record()));
  ASSERT_TRUE(store->save(endpoint_record()));
  ASSERT_TRUE(store->save_resolution("web", R"({"version":1})"));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(store->remove(network_record().id));
    EXPECT_TRUE(store->remove(endpoint_record().id));
    EXPECT_TRUE(store->remove_resolution("web"));
  }
  const auto contents = store->load();
  ASSERT_TRUE(contents);
  EXPECT_TRUE(contents->networks.empty());
  EXPECT_TRUE(contents->endpoints.empty());
  EXPECT_TRUE(contents->resolutions.empty());
}

TEST_F(StoreTest, APolicyNameCannotLeaveTheDirectory) {
  const auto store = open();
  EXPECT_FALSE(store->save_resolution("../../x", R"({"version":1})"));
  EXPECT_FALSE(fs::exists(base_ / "x.json"));
  EXPECT_FALSE(store->remove_resolution("../lock"));
}

TEST_F(StoreTest, TemporaryFilesAreGoneAfterLoad) {
  const auto store = open();
  ASSERT_TRUE(store->save(endpoint_record()));
  EXPECT_FALSE(fs::exists(endpoint_file().string() + ".new"));
  write(endpoint_file().string() + ".new", "half");
  write(network_file().string() + ".new", encode(network_record()));
  const auto contents = store->load();
  ASSERT_TRUE(contents);
  EXPECT_FALSE(fs::exists(endpoint_file().string() + ".new"));
  EXPECT_FALSE(fs::exists(network_file().string() + ".new"));
  EXPECT_TRUE(contents->networks.empty()) << "a write that was not finished counts as not begun";
  EXPECT_EQ(contents->endpoints.size(), 1U);
  EXPECT_TRUE(contents->damaged.empty());
}

TEST_F(StoreTest, DamagedFilesAreMovedAsideAndTheRestIsLoaded) {
  const auto store = open();
  ASSERT_TRUE(store->save(endpoint_record()));
  ASSERT_TRUE(store->save_resolution("good", R"({"version":1})"));
  const std::string other_id(64, 'd');
  write(directory_ / "endpoints" / (other_id + ".json"),
        encode(endpoint_record()));  // its name lies
  write(network_file(), "{");
  write(directory_ / "networks" / "short.json", encode(network_record()));
  write(directory_ / "networks" / "README", "");
  write(directory_ / "policies" / "web.json", R"({"version":1,"na)");
  write(directory_ / "policies" / "old.json", R"({"version":0})");
  write(directory_ / "policies" / "BAD NAME.json", R"({"version":1})");
  fs::create_directory(directory_ / "networks" / (std::string(64, 'e') + ".json"));
  fs::create_symlink("/etc/passwd", directory_ / "endpoints" / (std::string(64, 'f') + ".json"));

  const auto contents = store->load();
  ASSERT_TRUE(contents) << contents.error().to_string();
  EXPECT_TRUE(contents->networks.empty());
  EXPECT_EQ(contents->endpoints.size(), 1U);
  EXPECT_EQ(contents->resolutions.size(), 1U);
  EXPECT_EQ(contents->damaged.size(), 9U);
  EXPECT_EQ(files_in(directory_ / "damaged"), 9U);
  EXPECT_EQ(files_in(directory_ / "networks"), 0U);
  EXPECT_EQ(files_in(directory_ / "endpoints"), 1U);
  for (const auto& message : contents->damaged) {
    EXPECT_NE(message.find((directory_ / "damaged").string()), std::string::npos) << message;
  }
  EXPECT_TRUE(fs::exists("/etc/passwd"));
  // What was moved aside is not damage again.
  const auto again = store->load();
  ASSERT_TRUE(again);
  EXPECT_TRUE(again->damaged.empty());
}

TEST_F(StoreTest, ATruncatedFileIsNeverHalfAnEndpoint) {
  const auto store = open();
  const std::string whole = encode(endpoint_record());
  for (std::size_t length = 0; length < whole.size(); length += 7) {
    write(endpoint_file(), whole.substr(0, length));
    const auto contents = store->load();
    ASSERT_TRUE(contents);
    ASSERT_TRUE(contents->endpoints.empty()) << length;
    ASSERT_EQ(contents->damaged.size(), 1U);
    ASSERT_FALSE(fs::exists(endpoint_file()));
  }
}

// A file system of its own, in a mount namespace that ends with the thread.
template <class Work>
void on_tmpfs(const fs::path& at, const char* options, Work work) {
  std::thread([&] {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    ASSERT_EQ(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    ASSERT_EQ(::mount("tmpfs", at.c_str(), "tmpfs", 0, options), 0);
    work();
  }).join();
}

TEST_F(StoreTest, AFullFileSystemKeepsTheOldFile) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount";
  on_tmpfs(base_, "size=64k,mode=0700", [&] {
    const auto store = open();
    ASSERT_TRUE(store);
    ASSERT_TRUE(store->save(endpoint_record()));
    {
      std::ofstream fill(base_ / "fill");
      const std::string block(4096, 'x');
      for (int i = 0; i < 32 && fill; ++i) fill << block << std::flush;
    }
    EndpointRecord changed = endpoint_record();
    changed.release.reset();
    const Status full = store->save(changed);
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, ENOSPC);
    EXPECT_NE(full.error().operation.find(endpoint_file().string()), std::string::npos);
    EXPECT_NE(full.error().text.find("free space"), std::string::npos);
    EXPECT_FALSE(fs::exists(endpoint_file().string() + ".new"));
    EXPECT_EQ(text_of(endpoint_file()), encode(endpoint_record()));
    fs::remove(base_ / "fill");
    EXPECT_TRUE(store->save(changed));
    EXPECT_EQ(text_of(endpoint_file()), encode(changed));
  });
}

TEST_F(StoreTest, AReadOnlyFileSystemIsSaidSo) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount";
  on_tmpfs(base_, "size=1m,mode=0700", [&] {
    auto store = open();
    ASSERT_TRUE(store);
    ASSERT_TRUE(store->save(endpoint_record()));
    // Open files for writing forbid a remount.
    store.reset();
    ASSERT_EQ(::mount(nullptr, base_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0);
    const auto refused = Store::open(directory_);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, EROFS);
    EXPECT_NE(refused.error().operation.find(directory_.string()), std::string::npos);
    const auto missing = Store::open(base_ / "other");
    ASSERT_FALSE(missing);
    EXPECT_EQ(missing.error().code, EROFS);
  });
}

TEST_F(StoreTest, SavingToAReadOnlyMountKeepsTheOldFile) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount";
  on_tmpfs(base_, "size=1m,mode=0700", [&] {
    const auto store = open();
    ASSERT_TRUE(store);
    ASSERT_TRUE(store->save(endpoint_record()));
    const fs::path endpoints = directory_ / "endpoints";
    ASSERT_EQ(::mount(endpoints.c_str(), endpoints.c_str(), nullptr, MS_BIND, nullptr), 0);
    ASSERT_EQ(
        ::mount(nullptr, endpoints.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr), 0);
    const Status refused = store->save(endpoint_record());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, EROFS);
    const Status kept = store->remove(endpoint_record().id);
    ASSERT_FALSE(kept);
    EXPECT_EQ(kept.error().code, EROFS);
    EXPECT_EQ(text_of(endpoint_file()), encode(endpoint_record()));
  });
}

}  // namespace
}  // namespace agentgate::store

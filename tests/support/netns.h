// SPDX-License-Identifier: GPL-2.0-or-later
//
// Network namespaces for tests. Everything that a test sends stays in namespaces made here.
// Nothing of the code under test is used: what a test sees, it sees with other tools.
//
// Threading: a NetNamespace may be used from any thread; none of its calls leaves the calling
// thread in another namespace. Errors: constructors and run() throw; must(), sh() and json() fail
// the running test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

namespace agentgate::test {

struct Output {
  int status = -1;  // exit code, 128 + signal
  std::string out, err;
};

class NetNamespace {
 public:
  NetNamespace();
  ~NetNamespace();
  NetNamespace(const NetNamespace&) = delete;
  NetNamespace& operator=(const NetNamespace&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  // "/proc/<this process>/fd/N", for `ip link set … netns` and nsenter.
  [[nodiscard]] std::string path() const;

  // Runs `work` on a thread of its own inside the namespace, waits for it, and returns or throws
  // what it returned or threw.
  template <class Work>
  auto run(Work&& work) const {
    using Value = std::invoke_result_t<Work&>;
    if constexpr (std::is_void_v<Value>) {
      run_inside([&] { work(); });
    } else {
      std::optional<Value> value;
      run_inside([&] { value.emplace(work()); });
      return std::move(*value);
    }
  }
  // Runs a command inside. `must` fails the test when it does not exit with 0.
  Output exec(const std::vector<std::string>& argv) const;
  std::string must(const std::vector<std::string>& argv) const;
  std::string sh(const std::string& script) const { return must({"/bin/sh", "-ec", script}); }
  nlohmann::json json(const std::vector<std::string>& argv) const;

 private:
  void run_inside(const std::function<void()>& work) const;
  int fd_ = -1;
};

// One end of a veth pair.
struct LinkEnd {
  const NetNamespace& where;
  std::string name;
  std::string mac;                     // empty: the kernel chooses
  std::vector<std::string> addresses;  // "192.0.2.1/24", "2001:db8::1/64"; without DAD
};

// Both ends are up afterwards.
void make_veth(const LinkEnd& a, const LinkEnd& b);
// A bridge device with the given MAC and addresses, up, with the kernel's defaults otherwise.
void make_bridge(const LinkEnd& bridge);
void enslave(const NetNamespace& where, const std::string& bridge, const std::string& port);

// Skips without root; fails when namespaces cannot be made as root.
class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace agentgate::test

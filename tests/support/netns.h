// SPDX-License-Identifier: GPL-2.0-or-later
//
// Network namespaces for tests. Everything that a test sends stays in namespaces made here.
// Nothing of the code under test is used: what a test sees, it sees with other tools.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
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

  // Runs `work` on a thread of its own inside the namespace and waits for it.
  void run(const std::function<void()>& work) const;
  // Runs a command inside. `must` fails the test when it does not exit with 0.
  Output exec(const std::vector<std::string>& argv) const;
  std::string must(const std::vector<std::string>& argv) const;
  std::string sh(const std::string& script) const { return must({"/bin/sh", "-ec", script}); }
  nlohmann::json json(const std::vector<std::string>& argv) const;

 private:
  int fd_ = -1;
};

// Skips without root; fails when namespaces cannot be made as root.
class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace agentgate::test

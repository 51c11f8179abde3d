// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/checks.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>
#include <tuple>

namespace agentgate::arm {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

tl::unexpected<Error> refuse(std::string text) { return fail("", std::move(text), EPERM); }

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// Whether the file holds `needle`. A runtime's own strings are in its binary whatever it is called.
Result<bool> file_holds(const std::string& path, std::string_view needle) {
  const FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) return fail_errno("open " + path);
  struct stat status {};
  if (::fstat(file.fd, &status) < 0) return fail_errno("stat " + path);
  if (!S_ISREG(status.st_mode) || status.st_size == 0) return fail("read " + path, "not a program", EINVAL);
  // 50 MB take some milliseconds; a binary that did not change is not read again.
  using Key = std::tuple<dev_t, ino_t, off_t, time_t, long, std::string>;
  static std::mutex mutex;
  static std::map<Key, bool> known;
  const Key key{status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
                status.st_mtim.tv_nsec, std::string(needle)};
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* map = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (map == MAP_FAILED) return fail_errno("map " + path);
  const bool holds = ::memmem(map, size, needle.data(), needle.size()) != nullptr;
  ::munmap(map, size);
  const std::lock_guard lock(mutex);
  known[key] = holds;
  return holds;
}

// Resolves a runtime's path as the engine does: a bare name through PATH.
std::string resolve_program(const std::string& path) {
  if (path.find('/') != std::string::npos) return path;
  const char* list = std::getenv("PATH");
  std::istringstream folders(list != nullptr ? list : "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = folder + "/" + path;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return path;
}

constexpr std::string_view kGvisorText = "gvisor.dev/gvisor/runsc";
constexpr std::string_view kRuncText = "github.com/opencontainers/runc";

bool is_fallback_tunnel(const netdriver::SandboxLink& link) {
  // Tunnel modules put a device of their own in every new namespace; it leads nowhere while down.
  static constexpr std::array names = {"tunl0",    "gre0",  "gretap0", "erspan0", "ip_vti0",
                                       "ip6_vti0", "sit0",  "ip6tnl0", "ip6gre0", "ifb0", "ifb1"};
  return !link.up && std::find(names.begin(), names.end(), link.name.str()) != names.end();
}

}  // namespace

Evidence check_capabilities() {
  std::istringstream lines(read_file("/proc/thread-self/status"));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("CapEff:", 0) != 0) continue;
    const unsigned long long bits = std::strtoull(line.c_str() + 7, nullptr, 16);
    for (const auto& [bit, name] : {std::pair(CAP_NET_ADMIN, "CAP_NET_ADMIN"),
                                    std::pair(CAP_SYS_ADMIN, "CAP_SYS_ADMIN"),
                                    std::pair(CAP_SYS_PTRACE, "CAP_SYS_PTRACE")}) {
      if ((bits >> bit & 1ULL) == 0) {
        return refuse(std::string("the daemon lacks ") + name + "; run it as its unit file does");
      }
    }
    return "CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_PTRACE";
  }
  return refuse("/proc/thread-self/status cannot be read");
}

Evidence check_namespace(std::int64_t engine_pid) {
  struct stat own {};
  struct stat engine {};
  const std::string path = "/proc/" + std::to_string(engine_pid) + "/ns/net";
  if (::stat("/proc/thread-self/ns/net", &own) < 0) return fail_errno("own network namespace");
  if (::stat(path.c_str(), &engine) < 0) return fail_errno("network namespace of the engine", path);
  if (own.st_ino != engine.st_ino || own.st_dev != engine.st_dev) {
    return refuse("the engine (pid " + std::to_string(engine_pid) +
                  ") is in another network namespace than the daemon; run both in the host's");
  }
  return "network namespace " + std::to_string(own.st_ino) + " is the engine's";
}

Evidence hash_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    if (::access(path.c_str(), F_OK) < 0 && errno == ENOENT) return "absent";
    return fail_errno("read " + path);
  }
  std::stringstream stream;
  stream << file.rdbuf();
  const std::string text = stream.str();
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned length = 0;
  if (EVP_Digest(text.data(), text.size(), digest.data(), &length, EVP_sha256(), nullptr) != 1) {
    return fail("hash " + path, "SHA-256 is not available", ENOTSUP);
  }
  static constexpr char hex[] = "0123456789abcdef";
  std::string out;
  for (unsigned i = 0; i < length; ++i) {
    out += hex[digest[i] >> 4];
    out += hex[digest[i] & 0xF];
  }
  return out;
}

Evidence check_forwarding(const EndpointRecord& endpoint) {
  const std::string v4 = trimmed(read_file("/proc/sys/net/ipv4/ip_forward"));
  const std::string v6 = trimmed(read_file("/proc/sys/net/ipv6/conf/all/forwarding"));
  if (endpoint.address4 && v4 != "1") {
    return refuse("IPv4 forwarding is off, nothing could reach the container; run: sysctl -w "
                  "net.ipv4.ip_forward=1");
  }
  if (endpoint.address6 && v6 != "1") {
    return refuse("IPv6 forwarding is off, but the container has an IPv6 address; run: sysctl -w "
                  "net.ipv6.conf.all.forwarding=1, or create the network without --ipv6");
  }
  std::string out = "forwarding IPv4 " + v4 + " IPv6 " + v6;
  const std::string nf = trimmed(read_file("/proc/sys/net/bridge/bridge-nf-call-iptables"));
  return out + "; bridge-nf-call-iptables " + (nf.empty() ? "absent" : nf);
}

Evidence check_paused(const engine::Container& container) {
  if (!container.running || container.pid <= 0) {
    return refuse("the container is not running; start it, then: docker pause " + container.name);
  }
  if (container.restarting) return refuse("the container is being restarted; wait, then pause it");
  if (!container.paused) {
    return refuse("the container is not paused; run: docker pause " + container.name);
  }
  return "running and paused, pid " + std::to_string(container.pid);
}

Evidence check_restart_policy(const engine::Container& container) {
  if (!container.restart_policy.empty() && container.restart_policy != "no") {
    return refuse("its restart policy is '" + container.restart_policy +
                  "': it could come back unverified; recreate it with --restart no");
  }
  return "restart policy no";
}

Evidence check_networks(const engine::Container& container) {
  if (container.attachments.size() != 1) {
    std::string names;
    for (const auto& a : container.attachments) names += (names.empty() ? "" : ", ") + a.name;
    return refuse(container.attachments.empty()
                      ? "it is on no network; recreate it with --network on an agentgate network"
                      : "it is on " + std::to_string(container.attachments.size()) + " networks (" +
                            names + "); disconnect it from all but the agentgate network");
  }
  return "on network " + container.attachments[0].name + " only";
}

Evidence check_privileges(const engine::Container& container) {
  if (container.privileged) {
    return refuse("it is privileged: it could change the host; recreate it without --privileged");
  }
  const auto host_mode = [](const std::string& mode) {
    return mode == "host" || mode.rfind("container:", 0) == 0;
  };
  if (host_mode(container.network_mode)) {
    return refuse("its network mode is '" + container.network_mode +
                  "'; recreate it on an agentgate network");
  }
  for (const auto& [mode, option] :
       {std::pair(&container.pid_mode, "--pid"), std::pair(&container.ipc_mode, "--ipc"),
        std::pair(&container.uts_mode, "--uts")}) {
    if (host_mode(*mode)) {
      return refuse("it shares a namespace (" + std::string(option) + " " + *mode +
                    "); recreate it without " + option);
    }
  }
  return "not privileged, namespaces of its own";
}

Evidence check_ports(const engine::Container& container) {
  if (!container.published_ports.empty() || container.publish_all_ports) {
    return refuse("it publishes ports (" +
                  (container.published_ports.empty() ? std::string("all")
                                                     : container.published_ports.front()) +
                  "); recreate it without -p and -P");
  }
  return "no published ports";
}

Evidence identify_runtime(const std::string& name, const engine::Runtime& runtime) {
  // containerd shims are named by type; the type is the shim's binary name by containerd's rule.
  if (runtime.path.empty() || runtime.path.rfind("io.containerd.", 0) == 0) {
    const std::string& type = runtime.type.empty() ? runtime.path : runtime.type;
    if (type == "io.containerd.runsc.v1") return "runsc";
    if (type == "io.containerd.runc.v2" || type == "io.containerd.runtime.v1.linux") return "runc";
    if (type.empty() && name == "runc") return "runc";
    return refuse("runtime '" + name + "' is of type '" + type + "', which agentgate cannot verify");
  }
  std::error_code error;
  const std::string program = std::filesystem::canonical(resolve_program(runtime.path), error).string();
  if (error) {
    return refuse("the program of runtime '" + name + "', " + runtime.path + ", cannot be found (" +
                  error.message() + ")");
  }
  const auto gvisor = file_holds(program, kGvisorText);
  if (!gvisor) return refuse("the program of runtime '" + name + "': " + gvisor.error().to_string());
  if (*gvisor) return "runsc";
  const auto runc = file_holds(program, kRuncText);
  if (!runc) return refuse("the program of runtime '" + name + "': " + runc.error().to_string());
  if (*runc) return "runc";
  return refuse("the program of runtime '" + name + "', " + program +
                ", is neither gVisor's runsc nor runc");
}

Evidence check_runtime(const engine::Container& container, const engine::Info& info,
                       const policy::Policy& policy) {
  const std::string& name = container.runtime;
  engine::Runtime runtime;
  const auto known = info.runtimes.find(name);
  if (known != info.runtimes.end()) {
    runtime = known->second;
  } else if (name.rfind("io.containerd.", 0) == 0) {
    runtime.type = name;
  } else {
    return refuse("the engine does not know the container's runtime '" + name + "'");
  }
  auto is = identify_runtime(name, runtime);
  if (!is) return is;
  if (std::find(policy.runtimes.begin(), policy.runtimes.end(), *is) == policy.runtimes.end()) {
    std::string allowed;
    for (const auto& r : policy.runtimes) allowed += (allowed.empty() ? "" : ", ") + r;
    return refuse("its runtime '" + name + "' is really " + *is + "; policy " + policy.name +
                  " allows " + allowed + ": recreate it with --runtime, or change the policy");
  }
  return "runtime '" + name + "' is " + *is;
}

Evidence check_frozen(std::int64_t pid) {
  const std::string cgroups = read_file("/proc/" + std::to_string(pid) + "/cgroup");
  std::istringstream lines(cgroups);
  std::string evidence;
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers == "freezer") {
      const std::string state = trimmed(read_file("/sys/fs/cgroup/freezer" + path + "/freezer.state"));
      if (state.empty()) continue;
      if (state != "FROZEN") return refuse("the kernel says that it is not frozen (" + state + ")");
      return "kernel: freezer FROZEN";
    }
    if (controllers.empty()) {
      const std::string events = read_file("/sys/fs/cgroup" + path + "/cgroup.events");
      if (events.find("frozen 1") != std::string::npos) return "kernel: cgroup frozen";
      if (events.find("frozen 0") != std::string::npos && cgroups.find("freezer") == std::string::npos) {
        return refuse("the kernel says that it is not frozen (cgroup.events: frozen 0)");
      }
    }
  }
  return "kernel: freezer not visible from here";
}

Evidence check_alone(std::int64_t pid, int netns_fd) {
  struct stat wanted {};
  if (::fstat(netns_fd, &wanted) < 0) return fail_errno("network namespace of the container");
  const std::string own = read_file("/proc/" + std::to_string(pid) + "/cgroup");
  DIR* proc = ::opendir("/proc");
  if (proc == nullptr) return fail_errno("open /proc");
  unsigned inside = 0;
  std::string stranger;
  while (const dirent* entry = ::readdir(proc)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    char path[300];
    std::snprintf(path, sizeof path, "%s/ns/net", entry->d_name);
    struct stat status {};
    if (::fstatat(::dirfd(proc), path, &status, 0) < 0) continue;  // it has ended
    if (status.st_ino != wanted.st_ino || status.st_dev != wanted.st_dev) continue;
    ++inside;
    if (read_file(std::string("/proc/") + entry->d_name + "/cgroup") != own) {
      const std::string again = read_file(std::string("/proc/") + entry->d_name + "/cgroup");
      if (!again.empty() && again != own) stranger = entry->d_name;
    }
  }
  ::closedir(proc);
  if (!stranger.empty()) {
    return refuse("process " + stranger + " (" +
                  trimmed(read_file("/proc/" + stranger + "/comm")) +
                  ") of another container or of the host shares its network namespace; stop it "
                  "(docker run --network container:… does this)");
  }
  return std::to_string(inside) + " processes in its namespace, all its own";
}

Evidence check_links(const std::vector<netdriver::SandboxLink>& links,
                     const EndpointRecord& endpoint, bool addresses_may_be_absent,
                     netdriver::SandboxLink& out) {
  const netdriver::SandboxLink* only = nullptr;
  std::string names;
  std::size_t count = 0;
  for (const auto& link : links) {
    if (is_fallback_tunnel(link)) continue;
    ++count;
    names += (names.empty() ? "" : ", ") + link.name.str();
    only = &link;
  }
  if (count != 1) {
    return refuse("its namespace has " + std::to_string(count) + " links besides lo (" + names +
                  "), and must have one; disconnect it from other networks (docker_gwbridge "
                  "included)");
  }
  if (only->mac != endpoint.mac) {
    return refuse("its link " + only->name.str() + " has MAC " + only->mac.to_string() +
                  ", the endpoint's is " + endpoint.mac.to_string());
  }
  const auto has = [&](const IpAddress& ip) {
    return std::find(only->addresses.begin(), only->addresses.end(), ip) != only->addresses.end();
  };
  for (const IpAddress& ip : only->addresses) {
    const bool own = (endpoint.address4 && ip == IpAddress(*endpoint.address4)) ||
                     (endpoint.address6 && ip == IpAddress(*endpoint.address6));
    const bool link_local = ip.is_v6() && ip.v6().bytes()[0] == 0xFE && (ip.v6().bytes()[1] & 0xC0) == 0x80;
    if (!own && !link_local) {
      return refuse("its link has the address " + ip.to_string() + ", which is not its endpoint's");
    }
  }
  if (!addresses_may_be_absent) {
    for (const auto& ip : {endpoint.address4 ? std::optional<IpAddress>(*endpoint.address4) : std::nullopt,
                           endpoint.address6 ? std::optional<IpAddress>(*endpoint.address6) : std::nullopt}) {
      if (ip && !has(*ip)) {
        return refuse("its link lacks the endpoint's address " + ip->to_string());
      }
    }
  }
  out = *only;
  return "link " + only->name.str() + " index " + std::to_string(only->index) + " MAC " +
         only->mac.to_string();
}

}  // namespace agentgate::arm

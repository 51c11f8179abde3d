// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/checks.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <thread>
#include <tuple>

#include "plugin/arm/engine_files.h"

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

constexpr std::size_t kLargestFile = 16UL << 20U;

constexpr int kLooks = 10;
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

enum class Program { gvisor, runc, other };

// gVisor and runc are Go programs: the import paths of their own packages are in the binary.
constexpr std::string_view kGvisorText = "gvisor.dev/gvisor/runsc";
constexpr std::string_view kRuncText = "github.com/opencontainers/runc";

Result<Program> scan(int fd, const std::string& path) {
  constexpr std::size_t kBlock = 1 << 20;
  constexpr std::size_t kOverlap = 64;  // longer than either text
  std::string block(kBlock + kOverlap, '\0');
  std::size_t kept = 0;
  bool first = true;
  bool runc = false;
  for (;;) {
    const ssize_t length = ::read(fd, block.data() + kept, kBlock);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return fail_errno("read " + path);
    if (length == 0) return runc ? Program::runc : Program::other;
    const std::string_view seen(block.data(), kept + static_cast<std::size_t>(length));
    // A script can hold any text and run anything.
    if (first && seen.substr(0, 4) != "\177ELF") return Program::other;
    first = false;
    // memmem is several times faster than std::string_view::find here.
    const auto holds = [&](std::string_view text) {
      return ::memmem(seen.data(), seen.size(), text.data(), text.size()) != nullptr;
    };
    if (holds(kGvisorText)) return Program::gvisor;
    runc = runc || holds(kRuncText);
    kept = std::min(kOverlap, seen.size());
    std::memmove(block.data(), seen.data() + seen.size() - kept, kept);
  }
}

// What the program is, by its own text. 50 MB take some milliseconds; a program that did not
// change is not read again.
Result<Program> kind_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) < 0) return fail_errno("stat " + path);
  if (!S_ISREG(status.st_mode)) return fail("read " + path, "not a program", EINVAL);
  using Key = std::tuple<std::string, dev_t, ino_t, off_t, time_t, long>;
  static std::mutex mutex;
  static std::map<Key, Program> known;
  const Key key{path,           status.st_dev,         status.st_ino,
                status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
  {
    const std::lock_guard lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  auto kind = scan(fd, path);
  if (!kind) return kind;
  const std::lock_guard lock(mutex);
  if (known.size() > 64) known.clear();
  known[key] = *kind;
  return kind;
}

// Tunnel modules put a device of their own in every new namespace; it leads nowhere while down.
// The kind is the kernel's word: a veth that is called "sit0" is a link like any other.
bool is_fallback_tunnel(const netdriver::SandboxLink& link) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 9> known = {
      {{"tunl0", "ipip"},
       {"gre0", "gre"},
       {"gretap0", "gretap"},
       {"erspan0", "erspan"},
       {"ip_vti0", "vti"},
       {"ip6_vti0", "vti6"},
       {"sit0", "sit"},
       {"ip6tnl0", "ip6tnl"},
       {"ip6gre0", "ip6gre"}}};
  return !link.up && std::any_of(known.begin(), known.end(), [&](const auto& one) {
    return link.name.str() == one.first && link.kind == one.second;
  });
}

// runsc's flags: its own stack is the default; with "host" the guest uses the namespace's.
bool has_own_network_stack(const std::vector<std::string>& arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const std::string& argument) {
    const auto name = argument.find_first_not_of('-');
    const std::string flag = name == std::string::npos ? "" : argument.substr(name);
    return flag != "network" &&
           (flag.rfind("network=", 0) != 0 || flag == "network=sandbox" || flag == "network=none");
  });
}

}  // namespace

Evidence check_capabilities(const System& system) {
  const std::string path = system.proc + "/thread-self/status";
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("CapEff:", 0) != 0) continue;
    const unsigned long long bits = std::strtoull(line.c_str() + 7, nullptr, 16);
    for (const auto& [bit, name] :
         {std::pair(CAP_NET_ADMIN, "CAP_NET_ADMIN"), std::pair(CAP_SYS_ADMIN, "CAP_SYS_ADMIN"),
          std::pair(CAP_SYS_PTRACE, "CAP_SYS_PTRACE")}) {
      if ((bits >> bit & 1ULL) == 0) {
        return refuse(std::string("the daemon lacks ") + name + "; run it as its unit file does");
      }
    }
    return "CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_PTRACE";
  }
  return refuse(path + " cannot be read");
}

Evidence check_namespace(std::int64_t engine_pid, const System& system) {
  struct stat own {};
  struct stat engine {};
  const std::string path = system.proc + "/" + std::to_string(engine_pid) + "/ns/net";
  if (::stat((system.proc + "/thread-self/ns/net").c_str(), &own) < 0)
    return fail_errno("own network namespace");
  if (::stat(path.c_str(), &engine) < 0) return fail_errno("network namespace of the engine", path);
  if (own.st_ino != engine.st_ino || own.st_dev != engine.st_dev) {
    return refuse("the engine (pid " + std::to_string(engine_pid) +
                  ") is in another network namespace than the daemon; run both in the host's");
  }
  return "network namespace " + std::to_string(own.st_ino) + " is the engine's";
}

Result<std::optional<std::string>> read_as_engine(const std::string& path, std::int64_t engine_pid,
                                                  const System& system) {
  const auto file = EngineFiles(engine_pid, system).open(path, O_RDONLY);
  if (!file) {
    // ENOENT of the engine's root itself is the engine that has ended.
    if (file.error().code == ENOENT && file.error().operation == "open " + path) {
      return std::optional<std::string>();
    }
    return tl::unexpected(file.error());
  }
  std::string text;
  std::array<char, 16384> block{};
  for (;;) {
    const ssize_t length = ::read(file->get(), block.data(), block.size());
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return fail_errno("read " + path);
    if (length == 0) return text;
    text.append(block.data(), static_cast<std::size_t>(length));
    if (text.size() > kLargestFile) return fail("read " + path, "it is too large", EFBIG);
  }
}

Evidence hash_of(const std::string& path, std::int64_t engine_pid, const System& system) {
  const auto read = read_as_engine(path, engine_pid, system);
  if (!read) return tl::unexpected(read.error());
  if (!*read) return "absent";
  const std::string& text = **read;
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

Evidence check_forwarding(const EndpointRecord& endpoint, const System& system) {
  const std::string net = system.proc + "/sys/net/";
  const std::string v4 = trimmed(read_file(net + "ipv4/ip_forward"));
  const std::string v6 = trimmed(read_file(net + "ipv6/conf/all/forwarding"));
  if (endpoint.address4 && v4 != "1") {
    return refuse(
        "IPv4 forwarding is off, nothing could reach the container; run: sysctl -w "
        "net.ipv4.ip_forward=1");
  }
  if (endpoint.address6 && v6 != "1") {
    return refuse(
        "IPv6 forwarding is off, but the container has an IPv6 address; run: sysctl -w "
        "net.ipv6.conf.all.forwarding=1, or create the network without --ipv6");
  }
  std::string out = "forwarding IPv4 " + v4 + " IPv6 " + v6;
  const std::string nf = trimmed(read_file(net + "bridge/bridge-nf-call-iptables"));
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
    // Nobody disconnects a task: what the service says, its next task has again.
    if (!container.attachments.empty() && !container.swarm_service.empty()) {
      const std::string& service = container.swarm_service;
      return refuse("it is on " + std::to_string(container.attachments.size()) + " networks (" +
                    names + ") as a task of service " + service +
                    "; leave the service on the agentgate network alone: docker service update "
                    "--publish-rm PORT " +
                    service + " for a published port, --network-rm NETWORK for another network");
    }
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

Result<RuntimeSeen> identify_runtime(const std::string& name, const engine::Runtime& runtime,
                                     std::int64_t engine_pid, const System& system) {
  const auto refused = [&](const std::string& what) {
    return refuse("runtime '" + name + "' " + what);
  };
  std::string program = runtime.path;
  // containerd shims are named by type; the type is the shim's name by containerd's rule.
  if (runtime.path.empty() || runtime.path.rfind("io.containerd.", 0) == 0) {
    const std::string& type = runtime.type.empty() ? runtime.path : runtime.type;
    if (type == "io.containerd.runsc.v1") return RuntimeSeen{"runsc", "shim " + type, false};
    const bool runc_shim = type == "io.containerd.runc.v2" ||
                           type == "io.containerd.runtime.v1.linux" ||
                           (type.empty() && name == "runc");
    if (!runc_shim) {
      return refused("is of type '" + type +
                     "', which agentgate cannot verify; use runsc by its "
                     "path or io.containerd.runsc.v1");
    }
    // The runc shim runs whatever binary its options name.
    if (runtime.binary.empty()) return RuntimeSeen{"runc", "shim " + type, false};
    program = runtime.binary;
  }
  const EngineFiles files(engine_pid, system);
  std::string path;
  const auto opened = files.open_program(program, path);
  if (!opened) return refused("has the program " + program + ": " + opened.error().to_string());
  const auto kind = kind_of(opened->get(), path);
  if (!kind) return refused("has the program " + path + ": " + kind.error().to_string());
  if (*kind == Program::gvisor) {
    return RuntimeSeen{"runsc", path, has_own_network_stack(runtime.arguments)};
  }
  if (*kind == Program::runc) return RuntimeSeen{"runc", path, false};
  return refused("has the program " + path +
                 ", which is neither gVisor's runsc nor runc (a wrapper script cannot be verified; "
                 "use \"runtimeArgs\" of the engine instead)");
}

Result<RuntimeSeen> check_runtime(const engine::Container& container, const engine::Info& info,
                                  const policy::Policy& policy, std::int64_t engine_pid,
                                  const System& system) {
  const std::string& name = container.runtime;
  engine::Runtime runtime;
  const auto known = info.runtimes.find(name);
  if (known != info.runtimes.end()) {
    runtime = known->second;
  } else if (name.rfind("io.containerd.", 0) == 0) {
    runtime.type = name;
  } else {
    return refuse("the engine does not know the container's runtime '" + name +
                  "'; add it to \"runtimes\" in daemon.json and recreate the container");
  }
  auto seen = identify_runtime(name, runtime, engine_pid, system);
  if (!seen) return seen;
  if (std::find(policy.runtimes.begin(), policy.runtimes.end(), seen->kind) ==
      policy.runtimes.end()) {
    std::string allowed;
    for (const auto& r : policy.runtimes) allowed += (allowed.empty() ? "" : ", ") + r;
    return refuse("its runtime '" + name + "' is really " + seen->kind + " (" + seen->evidence +
                  "); policy " + policy.name + " allows " + allowed +
                  ": recreate it with --runtime, or change the policy");
  }
  seen->evidence = "runtime '" + name + "' is " + seen->kind + " (" + seen->evidence + ")";
  return seen;
}

Evidence check_frozen(std::int64_t pid, const std::string& runtime_kind, std::int64_t engine_pid,
                      const System& system) {
  std::string freezer;  // v1
  std::string unified;  // v2; in a hybrid set-up the freezer is where v1 says
  std::istringstream lines(read_file(system.proc + "/" + std::to_string(pid) + "/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers == "freezer") freezer = line.substr(second + 1);
    if (controllers.empty()) unified = line.substr(second + 1);
  }
  // A managed plugin's own view may end at its own cgroup; then the engine's.
  const auto read = [&](const std::string& file) {
    const std::string own = read_file(system.cgroups + file);
    if (!own.empty()) return own;
    const auto its = read_as_engine("/sys/fs/cgroup" + file, engine_pid, system);
    return its ? its->value_or("") : std::string();
  };
  bool frozen = false;
  std::string seen;
  if (!freezer.empty()) {
    seen = trimmed(read("/freezer" + freezer + "/freezer.state"));
    frozen = seen == "FROZEN";
  } else if (!unified.empty()) {
    const std::string events = read(unified + "/cgroup.events");
    frozen = events.find("frozen 1") != std::string::npos;
    if (!events.empty()) seen = frozen ? "frozen" : "not frozen";
  }
  if (seen.empty()) return "cgroup freezer: not visible from here";
  if (!frozen && runtime_kind == "runc") {
    return refuse("the engine says that it is paused, the kernel that it is not (cgroup freezer: " +
                  seen + "); pause it again");
  }
  return "cgroup freezer: " + seen;
}

// The inode that "net:[4026531840]" names.
std::optional<ino_t> inode_of(std::string_view link) {
  constexpr std::string_view prefix = "net:[";
  if (link.substr(0, prefix.size()) != prefix || link.back() != ']') return std::nullopt;
  link.remove_prefix(prefix.size());
  ino_t out = 0;
  const auto [end, error] = std::from_chars(link.data(), link.data() + link.size() - 1, out);
  if (error != std::errc() || end != link.data() + link.size() - 1) return std::nullopt;
  return out;
}

Result<Occupants> find_occupants(const System& system) {
  DIR* proc = ::opendir(system.proc.c_str());
  if (proc == nullptr) return fail_errno("open " + system.proc);
  const std::unique_ptr<DIR, int (*)(DIR*)> closed_at_the_end(proc, ::closedir);
  Occupants out;
  // All namespaces are files of one file system. Its number is asked for once; a stat for each
  // process costs up to three times what reading the link does.
  std::optional<dev_t> device;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(proc);
    if (entry == nullptr) break;
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    const std::string process = entry->d_name;
    const std::string path = process + "/ns/net";
    std::array<char, 64> link{};
    const ssize_t length = ::readlinkat(::dirfd(proc), path.c_str(), link.data(), link.size());
    if (length > 0 && device) {
      if (const auto inode =
              inode_of(std::string_view(link.data(), static_cast<std::size_t>(length)))) {
        out[{*device, *inode}].push_back(process);
        continue;
      }
    }
    struct stat status {};
    if (length < 0 || ::fstatat(::dirfd(proc), path.c_str(), &status, 0) < 0) {
      if (errno == ENOENT || errno == ESRCH) continue;  // it has ended
      if (errno != EACCES && errno != EPERM) {
        return fail_errno("look at " + system.proc + "/" + path);
      }
      out[kHidden].push_back(process);
      continue;
    }
    const auto inode = inode_of(std::string_view(link.data(), static_cast<std::size_t>(length)));
    if (inode == status.st_ino) device = status.st_dev;
    out[{status.st_dev, status.st_ino}].push_back(process);
  }
  if (errno != 0) return fail_errno("read " + system.proc);
  return out;
}

Result<Namespace> namespace_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) < 0) return fail_errno("network namespace", path);
  return Namespace{status.st_dev, status.st_ino};
}

Evidence check_alone(std::int64_t pid, const std::string& container_id, int netns_fd,
                     const System& system, const Occupants& occupants) {
  struct stat wanted {};
  if (::fstat(netns_fd, &wanted) < 0) return fail_errno("network namespace of the container");
  const auto cgroup_of = [&](const std::string& process) {
    return read_file(system.proc + "/" + process + "/cgroup");
  };
  const std::string own = cgroup_of(std::to_string(pid));
  // What runs in the container may sit in cgroups below it; the engine names those by the full id.
  const auto belongs = [&](const std::string& cgroup) {
    return cgroup == own ||
           (container_id.size() == 64 && cgroup.find(container_id) != std::string::npos);
  };
  const Namespace its{wanted.st_dev, wanted.st_ino};
  const auto found = occupants.find(its);
  const std::vector<std::string> inside =
      found == occupants.end() ? std::vector<std::string>() : found->second;
  const auto is_stranger = [&](const std::string& process) {
    const std::string cgroup = cgroup_of(process);
    if (cgroup.empty() || belongs(cgroup)) return false;
    // Its number may be another process's since the look through /proc.
    const auto now = namespace_of(system.proc + "/" + process + "/ns/net");
    return now && *now == its;
  };
  std::string stranger;
  for (const std::string& process : inside) {
    // What `docker exec` starts is in the namespace a moment before it is in the cgroup.
    bool strange = is_stranger(process);
    for (int look = 0; strange && look < kLooks; ++look) {
      std::this_thread::sleep_for(kBetweenLooks);
      strange = is_stranger(process);
    }
    if (!strange) continue;
    stranger = process;
    break;
  }
  if (!stranger.empty()) {
    return refuse("process " + stranger + " (" +
                  trimmed(read_file(system.proc + "/" + stranger + "/comm")) +
                  ") of another container or of the host shares its network namespace; stop it "
                  "(docker run --network container:… does this)");
  }
  std::string seen = std::to_string(inside.size()) + " processes in its namespace, all its own";
  if (const auto hidden = occupants.find(kHidden); hidden != occupants.end()) {
    seen += "; " + std::to_string(hidden->second.size()) + " of the host may not be looked at";
  }
  return seen;
}

Result<LinkSeen> check_links(const std::vector<netdriver::SandboxLink>& links,
                             const EndpointRecord& endpoint, bool addresses_may_be_absent) {
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
    const bool link_local =
        ip.is_v6() && ip.v6().bytes()[0] == 0xFE && (ip.v6().bytes()[1] & 0xC0) == 0x80;
    if (!own && !link_local) {
      return refuse("its link has the address " + ip.to_string() + ", which is not its endpoint's");
    }
  }
  if (!addresses_may_be_absent) {
    for (const auto& ip :
         {endpoint.address4 ? std::optional<IpAddress>(*endpoint.address4) : std::nullopt,
          endpoint.address6 ? std::optional<IpAddress>(*endpoint.address6) : std::nullopt}) {
      if (ip && !has(*ip)) {
        return refuse("its link lacks the endpoint's address " + ip->to_string());
      }
    }
  }
  return LinkSeen{*only, "link " + only->name.str() + " index " + std::to_string(only->index) +
                             " MAC " + only->mac.to_string()};
}

}  // namespace agentgate::arm

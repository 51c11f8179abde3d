// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/arm/pipeline.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "plugin/arm/audit.h"
#include "plugin/arm/checks.h"
#include "plugin/arm/doctor.h"
#include "plugin/arm/engine_files.h"
#include "plugin/arm/premises.h"
#include "plugin/failpoint.h"

namespace agentgate::arm {
namespace {

using Clock = std::chrono::steady_clock;
using netdriver::Difference;
using netdriver::PortState;

double since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::string text_of(const Difference& d) {
  return d.where + ": expected '" + d.expected + "', found '" + d.found + "'";
}

std::string first_few(const std::vector<Difference>& differences) {
  std::string out;
  for (std::size_t i = 0; i < differences.size() && i < 3; ++i) {
    out += (i == 0 ? "" : "; ") + text_of(differences[i]);
  }
  if (differences.size() > 3) out += "; and " + std::to_string(differences.size() - 3) + " more";
  return out;
}

tl::unexpected<Error> refuse(std::string text) { return fail("", std::move(text), EPERM); }

// The container's resolver file is bind-mounted, so it is written in place: a new file under the
// old name would be seen by nobody.
Status write_in_place(const EngineFiles& files, const std::string& path, const std::string& text) {
  const auto opened = files.open(path, O_WRONLY | O_NOFOLLOW);
  if (!opened) return tl::unexpected(opened.error());
  const netdriver::UniqueFd& file = *opened;
  struct stat status {};
  if (::fstat(file.get(), &status) < 0) return fail_errno("stat " + path);
  if (!S_ISREG(status.st_mode)) return fail("write " + path, "not a regular file", EINVAL);
  if (::ftruncate(file.get(), 0) < 0) return fail_errno("write " + path);
  if (::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return fail_errno("write " + path);
  }
  return {};
}

Result<std::string> read_back(const EngineFiles& files, const std::string& path) {
  const auto opened = files.open(path, O_RDONLY | O_NOFOLLOW);
  if (!opened) return tl::unexpected(opened.error());
  const netdriver::UniqueFd& file = *opened;
  std::string text(64UL * 1024, '\0');
  const ssize_t length = ::read(file.get(), text.data(), text.size());
  if (length < 0) return fail_errno("read " + path);
  text.resize(static_cast<std::size_t>(length));
  return text;
}

// Whether a person who says `text` may mean the container of this release.
bool names_container(const Release& release, const std::string& text) {
  return release.container_name == text ||
         (text.size() >= 12 && release.container_id.rfind(text, 0) == 0);
}

std::string joined(const std::vector<std::string>& list, const char* separator) {
  std::string out;
  for (const auto& item : list) out += (out.empty() ? "" : separator) + item;
  return out;
}

std::vector<std::string> names_of(const policy::Policy& policy) {
  std::vector<std::string> out;
  for (const auto& rule : policy.names) out.push_back(rule.name);
  return out;
}

// One mutex per key, kept only while somebody wants it.
class KeyedMutex {
 public:
  struct Lock {
    std::shared_ptr<std::mutex> mutex;
    std::unique_lock<std::mutex> held;
    bool waited = false;
  };
  Lock lock(const std::string& key) {
    Lock out = try_lock(key);
    out.waited = !out.held.owns_lock();
    if (out.waited) out.held.lock();
    return out;
  }
  // Not held when another one has it.
  Lock try_lock(const std::string& key) {
    Lock out;
    {
      const std::lock_guard guard(mutex_);
      for (auto at = known_.begin(); at != known_.end();) {
        at = at->second.expired() ? known_.erase(at) : std::next(at);
      }
      out.mutex = known_[key].lock();
      if (!out.mutex) known_[key] = out.mutex = std::make_shared<std::mutex>();
    }
    out.held = std::unique_lock(*out.mutex, std::try_to_lock);
    return out;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<std::mutex>> known_;
};

// What the policy's file names and what is pinned: where they differ, a refresh is due.
std::string name_drift(const policy::Policy& policy, const policy::Resolution& resolution) {
  std::vector<std::string> differences;
  const auto names = names_of(policy);
  for (const auto& name : names) {
    if (resolution.names.count(name) == 0) differences.push_back(name + " is not resolved yet");
  }
  for (const auto& [name, resolved] : resolution.names) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      differences.push_back(name + " has left the file but is still allowed");
    } else if (!resolved.error.empty()) {
      differences.push_back(name + " did not resolve last time (" + resolved.error + ")");
    }
  }
  return differences.empty() ? "" : "policy " + policy.name + ": " + joined(differences, "; ");
}

const std::string& policy_name(const EndpointRecord& endpoint, const NetworkRecord& network) {
  return endpoint.policy.empty() ? network.policy : endpoint.policy;
}

}  // namespace

struct Pipeline::Impl {
  Options options;
  host::Ports& ports;
  engine::Api& engine;
  Audit audit;

  KeyedMutex containers;  // by id: one operation at a time
  // By name: from the look at what is known of its names to the kernel's having it, so that an arm
  // cannot bring back what a refresh has just taken away.
  KeyedMutex policies;
  std::mutex mutex;
  // The engine's runtime table changes only with its process or its configuration.
  std::string info_key;
  engine::Info info;
  EngineGuardStatus guard_status;  // guarded by mutex

  Impl(Options o, host::Ports& p, engine::Api& e)
      : options(std::move(o)), ports(p), engine(e), audit(options.audit_file) {}

  [[nodiscard]] bool runs(const ProcessIdentity& process) const {
    return arm::runs(process, options.system);
  }

  Result<engine::Info> info_of(const engine::Identity& identity, const std::string& hash) {
    const std::string key = std::to_string(identity.process.pid) + " " +
                            std::to_string(identity.process.start_time) + " " + hash;
    {
      const std::lock_guard guard(mutex);
      if (info_key == key) return info;
    }
    auto fresh = engine.info();
    if (!fresh) return fresh;
    const std::lock_guard guard(mutex);
    info_key = key;
    info = *fresh;
    return fresh;
  }

  void write_audit(const Report& report) {
    if (const Status written = audit.write(report); !written) {
      spdlog::error("audit: {}", written.error().to_string());
    }
  }

  // What a policy's names stand for; asks for them when that is too old.
  Result<policy::Resolution> resolve(const policy::Policy& policy) {
    auto known = ports.resolution(policy.name);
    if (!known) return known;
    if (!policy::needs_refresh(policy, *known, std::chrono::system_clock::now())) return known;
    policy::Resolver resolver({options.resolvers, std::chrono::milliseconds(5000)});
    const policy::Resolution fresh = resolver.resolve(names_of(policy));
    // Others may have resolved meanwhile; names are asked for without holding anybody up.
    const auto lock = policies.lock(policy.name);
    known = ports.resolution(policy.name);
    if (!known) return known;
    policy::Resolution merged =
        policy::merge(policy, *known, fresh, std::chrono::system_clock::now());
    if (const Status saved = ports.save_resolution(policy.name, merged); !saved) {
      return tl::unexpected(saved.error());
    }
    return merged;
  }

  Status refresh(const std::string& name, Refreshed& out);
  Report close_for(const EndpointRecord& endpoint, const std::string& premise,
                   const std::string& event);

  Result<policy::Compiled> compile(const policy::Policy& policy,
                                   const policy::Resolution& resolution) {
    auto host = ports.host_addresses();
    if (!host) return tl::unexpected(host.error());
    const auto conflicts = policy::conflicts_with_host(policy, *host);
    if (!conflicts.empty()) return refuse(conflicts.front());
    policy::Compiled compiled = policy::compile(policy, resolution, *host);
    if (!compiled.unresolved.empty()) {
      return refuse("names of policy " + policy.name +
                    " do not resolve: " + joined(compiled.unresolved, "; ") +
                    " (mark a name \"optional\" to arm without it)");
    }
    return compiled;
  }
};

// One arm: what the steps learn is handed on here.
struct Pipeline::Run {
  Run(Impl& i, const ArmRequest& r, Report& out) : impl(i), request(r), report(out) {}

  Impl& impl;
  const ArmRequest& request;
  Report& report;

  engine::Identity identity{};
  std::string daemon_json;
  std::optional<engine::Container> inspected;  // before the steps began, when nobody held us up
  engine::Container container{};
  EndpointId endpoint_id{};
  host::Port port{};
  policy::Policy policy{};
  ProcessIdentity process{};
  netdriver::UniqueFd netns{};
  netdriver::SandboxLink link{};
  policy::Resolution resolution{};
  netdriver::PolicySpec spec{};
  std::string resolver_text{};
  std::string runtime{};  // "runsc" or "runc"

  [[nodiscard]] const System& system() const { return impl.options.system; }
  [[nodiscard]] EngineFiles engine_files() const { return {identity.process.pid, system()}; }

  // 1
  Evidence capabilities() {
    auto evidence = check_capabilities(system());
    if (!evidence) return evidence;
    if (const Status writable = impl.audit.writable(); !writable) {
      return tl::unexpected(writable.error());
    }
    return evidence;
  }
  // 2
  Evidence engine_answers() {
    auto answer = impl.engine.identify();
    if (!answer) return tl::unexpected(answer.error());
    identity = *answer;
    auto evidence = check_namespace(identity.process.pid, system());
    if (!evidence) return evidence;
    return "API " + identity.api_version + "; " + *evidence;
  }
  // 3
  Evidence engine_identity() {
    auto hash = hash_of(impl.options.daemon_json, identity.process.pid, system());
    if (!hash) return hash;
    daemon_json = *hash;
    return "engine pid " + std::to_string(identity.process.pid) + " started at tick " +
           std::to_string(identity.process.start_time) + "; daemon.json " + daemon_json;
  }
  // 4
  Evidence network_and_gate() {
    auto found = inspected ? Result<engine::Container>(std::move(*inspected))
                           : impl.engine.inspect(request.container);
    if (!found) {
      if (found.error().code == ENOENT) {
        return refuse("there is no container '" + request.container + "'; see: docker ps");
      }
      return tl::unexpected(found.error());
    }
    container = std::move(*found);
    report.container_id = container.id;
    report.container_name = container.name;
    // Step 5 judges the rest of the container; without its endpoint there is no network to check.
    if (auto good = check_paused_or_stopped(); !good) return good;
    if (auto good = check_privileges(container); !good) return good;
    if (auto good = check_networks(container); !good) return good;
    const engine::Attachment& attachment = container.attachments.front();
    auto id = EndpointId::parse(attachment.endpoint_id);
    if (!id) {
      return refuse("network " + attachment.name + " has no endpoint for it; is it running?");
    }
    auto known = impl.ports.find(*id);
    if (!known) {
      if (known.error().code == ENOENT) {
        return refuse("its network " + attachment.name +
                      " is not an agentgate network (or was made by another daemon); recreate the "
                      "container on one: docker network create -d agentgate NAME");
      }
      return tl::unexpected(known.error());
    }
    endpoint_id = *id;
    port = *known;
    report.network_id = port.network.id.str();
    report.endpoint_id = endpoint_id.str();
    report.port = port_name(endpoint_id).str();
    if (attachment.network_id != port.network.id.str()) {
      return refuse("the engine and agentgate disagree on the endpoint's network");
    }
    auto differences = impl.ports.inspect_network(port.network.id);
    if (!differences) return tl::unexpected(differences.error());
    if (!differences->empty()) {
      return refuse("the network is not as it should be: " + first_few(*differences) +
                    "; restart agentgated to repair it");
    }
    auto forwarding = check_forwarding(port.endpoint, system());
    if (!forwarding) return forwarding;
    return "bridge " + bridge_name(port.network.id).str() + " and the layers read back right; " +
           *forwarding;
  }
  Evidence check_paused_or_stopped() {
    // A stopped container has no endpoint; say that it is stopped rather than that.
    if (!container.running) return check_paused(container);
    return "";
  }
  // 5
  Evidence container_premises() {
    std::vector<std::string> all;
    report.policy = request.policy ? *request.policy : policy_name(port.endpoint, port.network);
    for (auto evidence : {check_paused(container), before_start()}) {
      if (!evidence) return evidence;
      all.push_back(std::move(*evidence));
    }

    auto started = engine::process_identity(container.pid, system().proc);
    if (!started) return tl::unexpected(started.error());
    process = *started;
    auto evidence = check_frozen(container.pid, runtime, identity.process.pid, system());
    if (!evidence) return evidence;
    all.push_back(std::move(*evidence));
    const std::string path = system().proc + "/" + std::to_string(container.pid) + "/ns/net";
    netns = netdriver::UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (netns.get() < 0) return fail_errno("network namespace of the container", path);
    evidence = alone();
    if (!evidence) return evidence;
    all.push_back(std::move(*evidence));
    if (!container.capabilities_added.empty()) {
      report.notes.push_back("it has added capabilities: " +
                             joined(container.capabilities_added, ", "));
    }
    return joined(all, "; ");
  }
  // Whether the policy report.policy takes the container's runtime.
  Evidence runtime_premise() {
    auto loaded = policy::load(impl.options.policy_directory, report.policy);
    if (!loaded) return tl::unexpected(loaded.error());
    policy = std::move(*loaded);
    report.policy_revision = policy.revision;
    auto info = impl.info_of(identity, daemon_json);
    if (!info) return tl::unexpected(info.error());
    // Docker 26 to 28 list a runtime that is a shim by its name alone, without its type.
    const auto listed = info->runtimes.find(container.runtime);
    if (listed != info->runtimes.end() && listed->second == engine::Runtime()) {
      const auto text = read_as_engine(impl.options.daemon_json, identity.process.pid, system());
      const auto configured = text && *text ? engine::runtimes_from_daemon_json(**text)
                                            : Result<std::map<std::string, engine::Runtime>>();
      if (configured && configured->count(container.runtime) != 0) {
        listed->second = configured->at(container.runtime);
      }
    }
    auto seen = check_runtime(container, *info, policy, identity.process.pid, system());
    if (!seen) return tl::unexpected(seen.error());
    runtime = seen->kind;
    std::string note;
    auto resolver = check_resolver(
        container, *seen, policy,
        [&] {
          return find_engine_resolver(info->server_version, identity.process,
                                      impl.options.daemon_json, impl.options.host_resolv_conf,
                                      system());
        },
        note);
    if (!resolver) return resolver;
    if (!note.empty()) report.notes.push_back(std::move(note));
    return seen->evidence + "; " + *resolver;
  }
  // What of step 5 is known before the container's program runs.
  Evidence before_start() {
    std::vector<std::string> all;
    for (const auto check : {check_restart_policy, check_networks, check_privileges, check_ports}) {
      auto evidence = check(container);
      if (!evidence) return evidence;
      all.push_back(std::move(*evidence));
    }
    auto fits = runtime_premise();
    if (!fits) return fits;
    all.push_back(std::move(*fits));
    return joined(all, "; ");
  }
  Evidence alone() {
    const auto occupants = find_occupants(system());
    if (!occupants) return tl::unexpected(occupants.error());
    return check_alone(container.pid, container.id, netns.get(), system(), *occupants);
  }
  // 6
  Evidence clean_slate() {
    std::vector<std::string> cleaned;
    const host::Snapshot snapshot = impl.ports.snapshot();
    for (const EndpointRecord& endpoint : snapshot.endpoints) {
      const bool own = endpoint.id == endpoint_id;
      // Left by an earlier container of that name; one that was only renamed still runs.
      const bool left = endpoint.release && endpoint.release->container_name == container.name &&
                        endpoint.release->container_id != container.id &&
                        !impl.runs(endpoint.release->process);
      if (!own && !left) continue;
      if (const Status clean = impl.ports.clean(endpoint.id); !clean) {
        return tl::unexpected(clean.error());
      }
      cleaned.push_back(port_name(endpoint.id).str());
    }
    return "nothing left on " + joined(cleaned, ", ");
  }
  // 7
  Evidence port_identification() {
    struct stat by_pid {};
    struct stat by_key {};
    if (::fstat(netns.get(), &by_pid) < 0) return fail_errno("network namespace of the container");
    const std::string& key = port.endpoint.sandbox_key;
    if (key.empty()) return refuse("the engine has not joined the endpoint to a sandbox");
    if (::stat(key.c_str(), &by_key) < 0) return fail_errno("sandbox of the endpoint", key);
    if (by_pid.st_ino != by_key.st_ino || by_pid.st_dev != by_key.st_dev) {
      return refuse(
          "the container's process is not in the sandbox that the endpoint was joined to");
    }
    auto links = impl.ports.sandbox_links(netns.get());
    if (!links) return tl::unexpected(links.error());
    auto only = check_links(*links, port.endpoint, runtime == "runsc");
    if (!only) return tl::unexpected(only.error());
    link = only->link;
    auto differences = impl.ports.tie(endpoint_id, link, netns.get());
    if (!differences) return tl::unexpected(differences.error());
    if (!differences->empty()) {
      return refuse("the container's link and the port are not the two ends of one veth: " +
                    first_few(*differences));
    }
    const engine::Attachment& seen = container.attachments.front();
    const std::string address4 = port.endpoint.address4 ? port.endpoint.address4->to_string() : "";
    const std::string address6 = port.endpoint.address6 ? port.endpoint.address6->to_string() : "";
    if (seen.mac != port.endpoint.mac.to_string() || seen.address4 != address4 ||
        seen.address6 != address6) {
      return refuse("the engine says MAC " + seen.mac + ", addresses '" + seen.address4 + "' '" +
                    seen.address6 + "', its endpoint has " + port.endpoint.mac.to_string() + " '" +
                    address4 + "' '" + address6 + "'; recreate the container");
    }
    return "port " + report.port + " and " + only->evidence + " are one veth, in namespace " +
           std::to_string(by_pid.st_ino);
  }
  // 8
  Evidence default_deny() {
    if (const Status closed = impl.ports.close(endpoint_id); !closed) {
      return tl::unexpected(closed.error());
    }
    return closed_evidence();
  }
  Evidence closed_evidence() {
    auto seen = impl.ports.inspect(endpoint_id);
    if (!seen) return tl::unexpected(seen.error());
    if (seen->state != PortState::closed) {
      return refuse("the port does not read back closed: " + first_few(seen->differences));
    }
    return "closed in all layers, read back";
  }
  // 9
  Evidence controls() {
    if (const Status prepared = impl.ports.prepare(endpoint_id); !prepared) {
      return tl::unexpected(prepared.error());
    }
    auto resolved = impl.resolve(policy);
    if (!resolved) return tl::unexpected(resolved.error());
    resolution = std::move(*resolved);
    auto compiled = impl.compile(policy, resolution);
    if (!compiled) return tl::unexpected(compiled.error());
    spec = std::move(compiled->spec);
    report.notes.insert(report.notes.end(), compiled->notes.begin(), compiled->notes.end());
    std::string evidence =
        "flags, FDB entry and neighbours set; policy " + policy.name + " resolved and compiled";
    if (policy.resolvers.empty()) return evidence + "; no resolvers, resolver file left alone";
    resolver_text = policy::resolv_conf(policy);
    if (const Status written =
            write_in_place(engine_files(), container.resolv_conf_path, resolver_text);
        !written) {
      return tl::unexpected(written.error());
    }
    return evidence + "; resolver file written";
  }
  // 10
  Evidence verification() {
    auto evidence = closed_evidence();
    if (!evidence) return evidence;
    auto differences = impl.ports.inspect_network(port.network.id);
    if (!differences) return tl::unexpected(differences.error());
    if (!differences->empty()) return refuse("the network has changed: " + first_few(*differences));
    if (!resolver_text.empty()) {
      auto text = read_back(engine_files(), container.resolv_conf_path);
      if (!text) return tl::unexpected(text.error());
      if (*text != resolver_text) return refuse("the resolver file does not read back as written");
    }
    return "every field of every layer as meant";
  }
  // What must not have changed since step 5.
  Evidence still_the_same() {
    auto now = impl.engine.inspect(container.id);
    if (!now) return tl::unexpected(now.error());
    if (now->pid != container.pid || now->started_at != container.started_at) {
      return refuse("the container was restarted meanwhile");
    }
    if (now->attachments.size() != 1 ||
        now->attachments.front().endpoint_id != container.attachments.front().endpoint_id) {
      return refuse("the container's networks changed meanwhile");
    }
    for (const auto check : {check_paused, check_restart_policy}) {
      if (auto evidence = check(*now); !evidence) return evidence;
    }
    if (!impl.runs(process)) return refuse("the container's process is another one now");
    return check_frozen(container.pid, runtime, identity.process.pid, system());
  }
  // A refresh may have been faster: what it took away must not come back.
  Status policy_is_current() {
    auto loaded = policy::load(impl.options.policy_directory, policy.name);
    if (!loaded) return tl::unexpected(loaded.error());
    if (loaded->revision != policy.revision) {
      return refuse("the file of policy " + policy.name + " was changed meanwhile; arm again");
    }
    auto known = impl.ports.resolution(policy.name);
    if (!known) return tl::unexpected(known.error());
    if (*known == resolution) return {};
    auto compiled = impl.compile(policy, *known);
    if (!compiled) return tl::unexpected(compiled.error());
    spec = std::move(compiled->spec);
    return {};
  }
  // 11
  Evidence release() {
    const auto lock = impl.policies.lock(policy.name);
    if (const Status current = policy_is_current(); !current) {
      return tl::unexpected(current.error());
    }
    auto same = still_the_same();
    if (!same) return same;
    Release record;
    record.container_id = container.id;
    record.container_name = container.name;
    record.process = process;
    record.policy = policy.name;
    record.released_at = utc_now();
    if (const Status released = impl.ports.release(endpoint_id, record, {spec, policy.revision});
        !released) {
      return tl::unexpected(released.error());
    }
    return "same process, paused; released in one batch";
  }
  // 12
  Evidence read_back_release() {
    auto seen = impl.ports.inspect(endpoint_id);
    if (!seen) return tl::unexpected(seen.error());
    if (seen->state != PortState::released) {
      return refuse("the release does not read back: " + (seen->differences.empty()
                                                              ? std::string("the port is closed")
                                                              : first_few(seen->differences)));
    }
    auto same = still_the_same();
    if (!same) return same;
    // Who came between step 5 and the release was no news to the guard yet.
    auto still_alone = alone();
    if (!still_alone) return still_alone;
    return "released exactly as meant; " + *same;
  }
  // 13
  Evidence engine_unchanged() {
    auto now = impl.engine.identify();
    if (!now) return tl::unexpected(now.error());
    auto hash = hash_of(impl.options.daemon_json, identity.process.pid, system());
    if (!hash) return hash;
    if (*now != identity) return refuse("the engine was restarted meanwhile");
    if (*hash != daemon_json) return refuse("daemon.json was changed meanwhile");
    return "same engine, same daemon.json";
  }

  struct StepDefinition {
    int number;
    const char* phase;
    const char* name;
    Evidence (Run::*work)();
  };
  static const std::vector<StepDefinition>& steps() {
    static const std::vector<StepDefinition> list = {
        {1, "preconditions", "capabilities", &Run::capabilities},
        {2, "preconditions", "engine answers", &Run::engine_answers},
        {3, "preconditions", "engine identity", &Run::engine_identity},
        {4, "preconditions", "network and gate", &Run::network_and_gate},
        {5, "preconditions", "container", &Run::container_premises},
        {6, "clean slate", "clean slate", &Run::clean_slate},
        {7, "port and default-deny", "port identification", &Run::port_identification},
        {8, "port and default-deny", "default-deny", &Run::default_deny},
        {9, "controls", "controls", &Run::controls},
        {10, "controls", "verification", &Run::verification},
        {11, "release", "release", &Run::release},
        {12, "release", "read-back", &Run::read_back_release},
        {13, "release", "engine unchanged", &Run::engine_unchanged}};
    return list;
  }

  void precheck() {
    const Evidence verdict = before_start_of_created();
    report.outcome = verdict ? Outcome::closed : Outcome::refused;
    if (verdict) return;
    report.reason =
        verdict.error().operation.empty() ? verdict.error().text : verdict.error().to_string();
  }
  Evidence before_start_of_created() {
    if (auto good = engine_answers(); !good) return good;
    if (auto good = engine_identity(); !good) return good;
    auto found = impl.engine.inspect(request.container);
    if (!found) {
      if (found.error().code == ENOENT) {
        return refuse("there is no container '" + request.container + "'; see: docker ps -a");
      }
      return tl::unexpected(found.error());
    }
    container = std::move(*found);
    if (!container.running) container.started_at = utc_now();  // as it would be
    report.container_id = container.id;
    report.container_name = container.name;
    if (request.policy) {
      report.policy = *request.policy;
    } else if (request.network) {
      auto networks = impl.ports.networks();
      if (!networks) return tl::unexpected(networks.error());
      for (const NetworkRecord& network : *networks) {
        if (network.id.str() == *request.network) report.policy = network.policy;
      }
    }
    if (report.policy.empty()) return refuse("name its policy, or an agentgate network's id");
    return before_start();
  }

  void execute() {
    bool failed = false;
    bool released = false;
    for (const StepDefinition& definition : steps()) {
      Step step{definition.number, definition.phase, definition.name, StepOutcome::skipped, "", 0};
      if (!failed) {
        const std::string point = "arm.step." + std::to_string(definition.number);
        failpoint(point);
        const auto start = Clock::now();
        const Evidence evidence = (this->*definition.work)();
        step.milliseconds = since(start);
        if (evidence) {
          step.outcome = StepOutcome::ok;
          step.evidence = *evidence;
          failpoint(point + ".done");
          if (definition.number == 11) released = true;
        } else {
          step.outcome = StepOutcome::failed;
          step.evidence = evidence.error().to_string();
          // EPERM is how a check says no; the errno adds nothing for the reader.
          if (evidence.error().operation.empty()) step.evidence = evidence.error().text;
          report.reason = step.evidence;
          failed = true;
        }
      }
      const bool close_again = step.outcome == StepOutcome::failed && step.number >= 9;
      report.steps.push_back(std::move(step));
      if (close_again) undo(released);
    }
    if (!failed) {
      report.outcome = Outcome::released;
      // Helps the container to its first packet; without it it finds the gateway by itself, later.
      if (const Status announced = impl.ports.announce(endpoint_id); !announced) {
        report.notes.push_back("the gateway was not announced: " + announced.error().to_string());
      }
    }
    if (failed && !released) close_earlier_release();
  }

  // A container that could not be verified now may still be released from before.
  void close_earlier_release() {
    const host::Snapshot snapshot = impl.ports.snapshot();
    for (const EndpointRecord& endpoint : snapshot.endpoints) {
      if (!endpoint.release) continue;
      const Release& earlier = *endpoint.release;
      const bool its = endpoint.id == endpoint_id ||
                       (report.container_id.empty() ? names_container(earlier, request.container)
                                                    : earlier.container_id == report.container_id);
      if (!its) continue;
      report.outcome = Outcome::undone;
      report.reason += "; the release of " + earlier.released_at + " is undone";
      if (const Status closed = impl.ports.close(endpoint.id);
          !closed && closed.error().code != ENOENT) {
        not_closed(closed.error());
      }
    }
  }
  void not_closed(const Error& error) {
    report.outcome = Outcome::undone;
    report.reason += "; AND THE PORT COULD NOT BE READ BACK CLOSED: " + error.to_string() +
                     ": remove the container now";
    spdlog::error("arm {}: {}", request.container, report.reason);
  }

  // Also when the batch of step 11 itself failed: its outcome may be unknown (ENOBUFS). What step 9
  // put in place goes as well, since a closed port's FDB entry would weaken layer 2.
  void undo(bool released) {
    report.outcome = released ? Outcome::undone : Outcome::refused;
    Status clean = impl.ports.clean(endpoint_id);
    if (clean) return;
    if (clean.error().code == ENOENT) return;  // the endpoint is gone, and its port with it
    clean = impl.ports.clean(endpoint_id);
    if (clean) return;
    not_closed(clean.error());
  }
};

Pipeline::Pipeline(Options options, host::Ports& ports, engine::Api& engine)
    : impl_(std::make_unique<Impl>(std::move(options), ports, engine)) {}
Pipeline::~Pipeline() = default;

namespace {

Report begun(const char* operation, const std::string& container) {
  Report report;
  report.operation = operation;
  report.container = container;
  report.started_at = utc_now();
  return report;
}

}  // namespace

Report Pipeline::arm(const ArmRequest& request) {
  const auto start = Clock::now();
  Report report = begun("arm", request.container);
  // Serialised by the id, since a container has many names; an unknown one by what was asked.
  auto found = impl_->engine.inspect(request.container);
  const auto lock = impl_->containers.lock(found ? found->id : request.container);
  Run run(*impl_, request, report);
  if (found && !lock.waited) run.inspected = std::move(*found);
  run.execute();
  report.milliseconds = since(start);
  impl_->write_audit(report);
  return report;
}

Report Pipeline::precheck(const ArmRequest& request) {
  const auto start = Clock::now();
  Report report = begun("precheck", request.container);
  Run run(*impl_, request, report);
  run.precheck();
  report.milliseconds = since(start);
  return report;
}

Report Pipeline::disarm(const std::string& container) {
  const auto start = Clock::now();
  Report report = begun("disarm", container);
  // The engine may be down and the container gone: what the releases say is enough.
  std::set<EndpointId> targets;
  const auto found = impl_->engine.inspect(container);
  const auto lock = impl_->containers.lock(found ? found->id : container);
  if (found) {
    report.container_id = found->id;
    report.container_name = found->name;
    for (const auto& attachment : found->attachments) {
      if (const auto id = EndpointId::parse(attachment.endpoint_id); id && impl_->ports.find(*id)) {
        targets.insert(*id);
      }
    }
  }
  const host::Snapshot snapshot = impl_->ports.snapshot();
  for (const EndpointRecord& endpoint : snapshot.endpoints) {
    if (!endpoint.release) continue;
    const Release& release = *endpoint.release;
    if (!found || release.container_id != found->id) {
      if (!names_container(release, container)) continue;
      // One that had the name before and runs under another one now is not meant. Asked last: it
      // is a look at /proc for each release.
      if (found && impl_->runs(release.process)) continue;
    }
    targets.insert(endpoint.id);
    report.policy = release.policy;
  }
  std::vector<std::string> failures;
  for (const EndpointId& id : targets) {
    Step step{8,
              "port and default-deny",
              "close " + port_name(id).str(),
              StepOutcome::ok,
              "closed in all layers, read back; FDB entry and neighbours removed",
              0};
    const auto began = Clock::now();
    if (const Status clean = impl_->ports.clean(id); !clean && clean.error().code != ENOENT) {
      step.outcome = StepOutcome::failed;
      step.evidence = clean.error().to_string();
      failures.push_back(step.evidence);
    }
    step.milliseconds = since(began);
    report.endpoint_id = id.str();
    report.port = port_name(id).str();
    report.steps.push_back(std::move(step));
  }
  if (!failures.empty()) {
    report.outcome = Outcome::inconsistent;
    report.reason = "the port could not be closed: " + failures.front() + ": remove the container";
    spdlog::error("disarm {}: {}", container, report.reason);
  } else if (targets.empty() && !found) {
    report.outcome = Outcome::refused;
    report.reason = found.error().code == ENOENT
                        ? "there is no container '" + container + "', and no port released for it"
                        : "no port is released for '" + container +
                              "', and the engine cannot say "
                              "more: " +
                              found.error().to_string();
  } else if (targets.empty() && !found->running) {
    report.outcome = Outcome::closed;
    report.notes.push_back("it is not running and has no port");
  } else if (targets.empty()) {
    report.outcome = Outcome::refused;
    report.reason = "'" + container + "' is not on an agentgate network";
  } else {
    report.outcome = Outcome::closed;
  }
  report.milliseconds = since(start);
  impl_->write_audit(report);
  return report;
}

Report Pipeline::check(const std::string& container) {
  const auto start = Clock::now();
  Report report = begun("check", container);
  const auto done = [&] {
    report.milliseconds = since(start);
    return report;
  };
  const auto found = impl_->engine.inspect(container);
  std::optional<EndpointId> target;
  const host::Snapshot snapshot = impl_->ports.snapshot();
  if (found) {
    report.container_id = found->id;
    report.container_name = found->name;
    for (const auto& attachment : found->attachments) {
      if (const auto id = EndpointId::parse(attachment.endpoint_id); id && impl_->ports.find(*id)) {
        target = *id;
      }
    }
  } else {
    for (const EndpointRecord& endpoint : snapshot.endpoints) {
      if (endpoint.release && names_container(*endpoint.release, container)) {
        target = endpoint.id;
        report.container_id = endpoint.release->container_id;
        report.container_name = endpoint.release->container_name;
      }
    }
    report.notes.push_back("engine: " + found.error().to_string());
  }
  if (!target) {
    report.outcome = Outcome::refused;
    report.reason = found ? "'" + container +
                                "' has no port of agentgate's (not running, or on "
                                "another network)"
                          : "there is no port released for '" + container + "'";
    return done();
  }
  const auto port = impl_->ports.find(*target);
  if (!port) {
    report.reason = port.error().to_string();
    return done();
  }
  report.network_id = port->network.id.str();
  report.endpoint_id = target->str();
  report.port = port_name(*target).str();
  const auto& release = port->endpoint.release;
  report.policy = release ? release->policy : policy_name(port->endpoint, port->network);

  auto seen = impl_->ports.inspect(*target);
  auto network = impl_->ports.inspect_network(port->network.id);
  auto foreign = impl_->ports.foreign_entries(*target);
  if (!seen || !network || !foreign) {
    report.outcome = Outcome::inconsistent;
    report.reason = (!seen      ? seen.error()
                     : !network ? network.error()
                                : foreign.error())
                        .to_string();
    return done();
  }
  for (const Difference& difference : seen->differences) {
    report.differences.push_back(text_of(difference));
  }
  for (const Difference& difference : *network) report.differences.push_back(text_of(difference));
  for (const Difference& difference : *foreign) report.differences.push_back(text_of(difference));
  if (release && seen->state == PortState::closed) {
    report.differences.emplace_back("released by record, but closed in the kernel");
  }
  if (release) {
    const auto differ = [&](const std::vector<Error>& premises) {
      for (const Error& error : premises) {
        report.differences.push_back("premise: " + error.text);
      }
    };
    if (found) differ(broken_by_engine(*found));
    if (found && found->id != release->container_id) {
      differ({another_process()});
    } else {
      const System& system = impl_->options.system;
      differ(broken_by_kernel(port->endpoint, impl_->ports, system, find_occupants(system)));
    }
  }
  if (release) {
    const auto loaded = policy::load(impl_->options.policy_directory, release->policy);
    const auto resolution = impl_->ports.resolution(release->policy);
    const auto revision = snapshot.revisions.find(release->policy);
    if (revision != snapshot.revisions.end()) report.policy_revision = revision->second;
    if (!loaded) {
      report.notes.push_back("policy file: " + loaded.error().to_string());
    } else {
      if (loaded->revision != report.policy_revision) {
        report.notes.push_back("the file of policy " + release->policy + " is revision " +
                               loaded->revision +
                               " now; to put it into force run: agentgate refresh");
      }
      if (resolution &&
          policy::needs_refresh(*loaded, *resolution, std::chrono::system_clock::now())) {
        report.notes.push_back("names of policy " + release->policy +
                               " are older than its refresh time; run: agentgate refresh");
      }
      const std::string drift = resolution ? name_drift(*loaded, *resolution) : "";
      if (!drift.empty()) report.notes.push_back(drift + "; run: agentgate refresh");
    }
  }
  if (!report.differences.empty()) {
    report.outcome = Outcome::inconsistent;
    report.reason = "the port is not what it is meant to be: " + report.differences.front();
  } else {
    report.outcome = release ? Outcome::released : Outcome::closed;
  }
  return done();
}

namespace {

bool holds(const policy::Resolution& resolution, const std::string& name,
           const IpAddress& address) {
  const auto found = resolution.names.find(name);
  return found != resolution.names.end() &&
         std::any_of(found->second.addresses.begin(), found->second.addresses.end(),
                     [&](const auto& other) { return other.address == address; });
}

void compare(const policy::Resolution& before, const policy::Resolution& fresh,
             const policy::Resolution& after, Refreshed& out) {
  for (const auto& [name, resolved] : after.names) {
    for (const auto& seen : resolved.addresses) {
      const std::string text = name + " " + seen.address.to_string();
      if (!holds(before, name, seen.address)) out.added.push_back(text);
      if (!holds(fresh, name, seen.address)) out.kept.push_back(text);
    }
  }
  for (const auto& [name, resolved] : before.names) {
    for (const auto& seen : resolved.addresses) {
      if (!holds(after, name, seen.address)) {
        out.removed.push_back(name + " " + seen.address.to_string());
      }
    }
  }
}

}  // namespace

// The error is what kept the kernel as it was; what could not be had of single names is in `out`.
Status Pipeline::Impl::refresh(const std::string& name, Refreshed& out) {
  const auto loaded = policy::load(options.policy_directory, name);
  if (!loaded) return tl::unexpected(loaded.error());
  out.revision = loaded->revision;
  auto host = ports.host_addresses();
  if (!host) return tl::unexpected(host.error());
  const auto conflicts = policy::conflicts_with_host(*loaded, *host);
  if (!conflicts.empty()) return refuse(conflicts.front());
  policy::Resolver resolver({options.resolvers, std::chrono::milliseconds(5000)});
  const policy::Resolution fresh = resolver.resolve(names_of(*loaded));
  // From here on no arm compiles from what was known before.
  const auto lock = policies.lock(name);
  const auto again = policy::load(options.policy_directory, name);
  if (!again) return tl::unexpected(again.error());
  if (again->revision != loaded->revision) {
    return refuse("the file of policy " + name + " was changed meanwhile; refresh again");
  }
  const auto known = ports.resolution(name);
  if (!known) return tl::unexpected(known.error());
  const policy::Resolution merged =
      policy::merge(*loaded, *known, fresh, std::chrono::system_clock::now());
  const policy::Compiled compiled = policy::compile(*loaded, merged, *host);
  if (Status updated = ports.update_policy({compiled.spec, loaded->revision}); !updated) {
    return updated;
  }
  if (Status saved = ports.save_resolution(name, merged); !saved) return saved;
  compare(*known, fresh, merged, out);
  std::vector<std::string> problems = compiled.unresolved;
  for (const auto& rule : loaded->names) {
    const auto asked = fresh.names.find(rule.name);
    const bool answered = asked != fresh.names.end() && asked->second.error.empty();
    const auto kept = merged.names.find(rule.name);
    if (answered || rule.optional || kept == merged.names.end() || kept->second.addresses.empty()) {
      continue;  // without any address it is among the unresolved
    }
    problems.push_back(rule.name + ": " + kept->second.error + "; its last addresses stay");
  }
  out.ok = problems.empty();
  out.error = joined(problems, "; ");
  return {};
}

std::vector<Refreshed> Pipeline::refresh(const std::optional<std::string>& only) {
  std::map<std::string, std::size_t> in_use;
  const host::Snapshot snapshot = impl_->ports.snapshot();
  for (const EndpointRecord& endpoint : snapshot.endpoints) {
    if (endpoint.release) ++in_use[endpoint.release->policy];
  }
  if (only) in_use = {{*only, in_use.count(*only) != 0 ? in_use[*only] : 0}};
  std::vector<Refreshed> out;
  for (const auto& [name, ports] : in_use) {
    Refreshed refreshed;
    refreshed.policy = name;
    refreshed.ports = ports;
    if (const Status done = impl_->refresh(name, refreshed); !done) {
      const Error& error = done.error();
      refreshed.error = (error.operation.empty() ? error.text : error.to_string()) +
                        "; what was released stays as it is";
    }
    out.push_back(std::move(refreshed));
  }
  return out;
}

host::Snapshot Pipeline::status() {
  host::Snapshot out = impl_->ports.snapshot();
  const std::vector<std::string> guards = engine_guard().incidents;
  if (guards.empty()) return out;
  out.incidents.insert(out.incidents.end(), guards.begin(), guards.end());
  std::stable_sort(out.incidents.begin(), out.incidents.end());  // by time
  return out;
}

EngineGuardStatus Pipeline::engine_guard() {
  const std::lock_guard lock(impl_->mutex);
  return impl_->guard_status;
}

void Pipeline::guard_seen(const EngineGuardStatus& status) {
  const std::lock_guard lock(impl_->mutex);
  impl_->guard_status = status;
}

// ---- the premises of releases, again -----------------------------------------------------------

Result<std::vector<std::string>> Pipeline::released() {
  const host::Snapshot snapshot = impl_->ports.snapshot();
  if (!snapshot.ready) return fail("releases", "not known yet: " + snapshot.failure, EAGAIN);
  std::vector<std::string> out;
  for (const EndpointRecord& endpoint : snapshot.endpoints) {
    if (endpoint.release) out.push_back(endpoint.release->container_id);
  }
  return out;
}

// The caller holds the container's lock.
Report Pipeline::Impl::close_for(const EndpointRecord& endpoint, const std::string& premise,
                                 const std::string& event) {
  const auto start = Clock::now();
  const Release& release = *endpoint.release;
  Report report;
  report.operation = "guard";
  report.container = release.container_name;
  report.container_id = release.container_id;
  report.container_name = release.container_name;
  report.network_id = endpoint.network.str();
  report.endpoint_id = endpoint.id.str();
  report.port = port_name(endpoint.id).str();
  report.policy = release.policy;
  report.started_at = utc_now();
  if (runs(release.process)) {
    report.outcome = Outcome::undone;
    report.reason =
        "premise: " + premise + "; the release of " + release.released_at + " is undone";
  } else {  // not found wanting
    report.outcome = Outcome::closed;
    report.reason = "its process has ended, and with it the release of " + release.released_at;
  }
  report.notes.push_back("after: " + event);
  Status closed = ports.clean(endpoint.id);
  // ENOENT: the port is gone with its endpoint.
  if (!closed && closed.error().code != ENOENT) closed = ports.clean(endpoint.id);
  if (!closed && closed.error().code != ENOENT) {
    report.outcome = Outcome::inconsistent;
    report.reason += "; AND THE PORT COULD NOT BE READ BACK CLOSED: " + closed.error().to_string() +
                     ": remove the container now";
  }
  report.milliseconds = since(start);
  write_audit(report);
  return report;
}

Rechecked Pipeline::recheck(const std::vector<std::string>& containers, Premises which,
                            engine::Api& engine, const std::string& event) {
  Rechecked out;
  const host::Snapshot snapshot = impl_->ports.snapshot();
  if (!snapshot.ready) {
    out.again = containers;
    return out;
  }
  const std::set<std::string> wanted(containers.begin(), containers.end());
  std::optional<Result<Occupants>> occupants;  // one look for all
  for (const EndpointRecord& known : snapshot.endpoints) {
    if (!known.release || wanted.count(known.release->container_id) == 0) continue;
    const std::string container = known.release->container_id;
    const auto lock = impl_->containers.try_lock(container);
    if (!lock.held) {
      out.again.push_back(container);
      continue;
    }
    // Held from here on: what it is released for cannot change any more.
    const auto port = impl_->ports.find(known.id);
    if (!port) {
      if (port.error().code != ENOENT) out.again.push_back(container);
      continue;
    }
    const EndpointRecord& endpoint = port->endpoint;
    if (!endpoint.release || endpoint.release->container_id != container) continue;
    std::vector<Error> broken;
    if (which != Premises::engine) {
      if (!occupants) occupants = find_occupants(impl_->options.system);
      broken = broken_by_kernel(endpoint, impl_->ports, impl_->options.system, *occupants);
    }
    // What the kernel says is enough, and the engine may be slow.
    const bool enough = std::any_of(broken.begin(), broken.end(), does_not_hold);
    if (!enough && which != Premises::kernel) {
      const auto found = engine.inspect(container);
      if (found) {
        for (Error& error : broken_by_engine(*found)) broken.push_back(std::move(error));
      } else if (found.error().code == ENOENT) {
        broken.push_back({"", EPERM, std::nullopt, "the engine does not know the container"});
      } else {
        broken.push_back(found.error());
      }
    }
    const auto first = std::find_if(broken.begin(), broken.end(), does_not_hold);
    if (first != broken.end()) {
      out.closed.push_back(impl_->close_for(endpoint, first->text, event));
      if (out.closed.back().outcome == Outcome::inconsistent) out.again.push_back(container);
    } else if (!broken.empty()) {
      spdlog::debug("engine guard: {}: {}", endpoint.release->container_name,
                    broken.front().to_string());
      out.again.push_back(container);
    }
  }
  return out;
}

Rechecked Pipeline::started(const std::string& container, engine::Api& engine,
                            const std::string& event) {
  Rechecked out;
  const host::Snapshot snapshot = impl_->ports.snapshot();
  if (!snapshot.ready) {
    out.again.push_back(container);
    return out;
  }
  const auto is_released = [](const EndpointRecord& one) { return one.release.has_value(); };
  if (std::none_of(snapshot.endpoints.begin(), snapshot.endpoints.end(), is_released)) return out;
  const auto found = engine.inspect(container);
  if (!found) {
    if (found.error().code != ENOENT) out.again.push_back(container);  // else gone, and with it all
    return out;
  }
  std::optional<Namespace> its;
  if (found->pid > 0) {
    const auto seen =
        namespace_of(impl_->options.system.proc + "/" + std::to_string(found->pid) + "/ns/net");
    if (seen) its = *seen;
  }
  for (const EndpointRecord& known : snapshot.endpoints) {
    if (!known.release || known.release->container_id == found->id) continue;
    // By name as well: it may have ended already, after it did what it came for.
    bool inside = found->network_mode == "container:" + known.release->container_id;
    if (!inside && its) {
      const auto sandbox = namespace_of(known.sandbox_key);
      inside = sandbox && *sandbox == *its;
    }
    if (!inside) continue;
    const auto lock = impl_->containers.try_lock(known.release->container_id);
    const auto port = impl_->ports.find(known.id);
    const bool judged = lock.held && (port || port.error().code == ENOENT);
    if (!judged) out.again.push_back(container);
    if (!judged || !port || port->endpoint.release != known.release) continue;
    out.closed.push_back(impl_->close_for(
        port->endpoint, "container " + found->name + " was started in its network namespace",
        event));
    if (out.closed.back().outcome == Outcome::inconsistent) out.again.push_back(container);
  }
  Rechecked own = recheck({found->id}, Premises::all, engine, event);
  out.closed.insert(out.closed.end(), own.closed.begin(), own.closed.end());
  out.again.insert(out.again.end(), own.again.begin(), own.again.end());
  return out;
}

std::vector<Finding> Pipeline::doctor() {
  return examine(impl_->options, impl_->ports, impl_->engine, engine_guard());
}

}  // namespace agentgate::arm

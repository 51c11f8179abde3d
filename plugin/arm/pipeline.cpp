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

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// The container's resolver file is bind-mounted, so it is written in place: a new file under the
// old name would be seen by nobody.
Status write_in_place(const std::string& path, const std::string& text) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return fail_errno("open " + path);
  struct stat status {};
  if (::fstat(file.get(), &status) < 0) return fail_errno("stat " + path);
  if (!S_ISREG(status.st_mode)) return fail("write " + path, "not a regular file", EINVAL);
  if (::ftruncate(file.get(), 0) < 0) return fail_errno("write " + path);
  if (::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return fail_errno("write " + path);
  }
  return {};
}

Result<std::string> read_back(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (file.get() < 0) return fail_errno("open " + path);
  std::string text(64 * 1024, '\0');
  const ssize_t length = ::read(file.get(), text.data(), text.size());
  if (length < 0) return fail_errno("read " + path);
  text.resize(static_cast<std::size_t>(length));
  return text;
}

std::vector<std::string> names_of(const policy::Policy& policy) {
  std::vector<std::string> out;
  for (const auto& rule : policy.names) out.push_back(rule.name);
  return out;
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

  std::mutex mutex;
  std::map<std::string, std::shared_ptr<std::mutex>> locks;  // by container id
  // The engine's runtime table changes only with its process or its configuration.
  std::string info_key;
  engine::Info info;

  Impl(Options o, host::Ports& p, engine::Api& e)
      : options(std::move(o)), ports(p), engine(e), audit(options.audit_file) {}

  std::shared_ptr<std::mutex> lock_of(const std::string& container) {
    const std::lock_guard guard(mutex);
    auto& lock = locks[container];
    if (!lock) lock = std::make_shared<std::mutex>();
    return lock;
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

  // Loads, resolves where needed, compiles. `notes` collects what a person should know.
  struct Ready {
    policy::Policy policy;
    netdriver::PolicySpec spec;
    bool resolved = false;
  };
  Result<Ready> ready(policy::Policy loaded, std::vector<std::string>& notes) {
    Ready out;
    out.policy = std::move(loaded);
    auto host = ports.host_addresses();
    if (!host) return tl::unexpected(host.error());
    const auto conflicts = policy::conflicts_with_host(out.policy, *host);
    if (!conflicts.empty()) return refuse(conflicts.front());
    auto known = ports.resolution(out.policy.name);
    if (!known) return tl::unexpected(known.error());
    const auto now = std::chrono::system_clock::now();
    policy::Resolution resolution = *known;
    if (policy::needs_refresh(out.policy, resolution, now)) {
      policy::Resolver resolver({options.resolvers, std::chrono::milliseconds(5000)});
      resolution = policy::merge(out.policy, *known, resolver.resolve(names_of(out.policy)), now);
      out.resolved = true;
      if (const Status saved = ports.save_resolution(out.policy.name, resolution); !saved) {
        return tl::unexpected(saved.error());
      }
    }
    policy::Compiled compiled = policy::compile(out.policy, resolution, *host);
    notes.insert(notes.end(), compiled.notes.begin(), compiled.notes.end());
    if (!compiled.unresolved.empty()) {
      std::string text;
      for (const auto& name : compiled.unresolved) text += (text.empty() ? "" : "; ") + name;
      return refuse("names of policy " + out.policy.name + " do not resolve: " + text +
                    " (mark a name \"optional\" to arm without it)");
    }
    out.spec = std::move(compiled.spec);
    return out;
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
  engine::Container container{};
  EndpointId endpoint_id{};
  host::Port port{};
  policy::Policy policy{};
  ProcessIdentity process{};
  Fd netns{};
  netdriver::SandboxLink link{};
  netdriver::PolicySpec spec{};
  std::string resolver_text{};
  std::string runtime{};  // "runsc" or "runc"

  // 1
  Evidence capabilities() {
    auto evidence = check_capabilities();
    if (!evidence) return evidence;
    if (const Status writable = impl.audit.writable(); !writable) return tl::unexpected(writable.error());
    return evidence;
  }
  // 2
  Evidence engine_answers() {
    auto answer = impl.engine.identify();
    if (!answer) return tl::unexpected(answer.error());
    identity = *answer;
    auto evidence = check_namespace(identity.process.pid);
    if (!evidence) return evidence;
    return "API " + identity.api_version + "; " + *evidence;
  }
  // 3
  Evidence engine_identity() {
    auto hash = hash_of(impl.options.daemon_json);
    if (!hash) return hash;
    daemon_json = *hash;
    return "engine pid " + std::to_string(identity.process.pid) + " started at tick " +
           std::to_string(identity.process.start_time) + "; daemon.json " + daemon_json;
  }
  // 4
  Evidence network_and_gate() {
    auto found = impl.engine.inspect(request.container);
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
    auto forwarding = check_forwarding(port.endpoint);
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
    std::string all;
    const auto add = [&](const Evidence& evidence) {
      if (evidence) all += (all.empty() ? "" : "; ") + *evidence;
      return evidence.has_value();
    };
    Evidence evidence = check_paused(container);
    if (!add(evidence)) return evidence;
    evidence = check_restart_policy(container);
    if (!add(evidence)) return evidence;
    evidence = check_networks(container);
    if (!add(evidence)) return evidence;
    evidence = check_privileges(container);
    if (!add(evidence)) return evidence;
    evidence = check_ports(container);
    if (!add(evidence)) return evidence;

    report.policy = request.policy ? *request.policy : policy_name(port.endpoint, port.network);
    auto loaded = policy::load(impl.options.policy_directory, report.policy);
    if (!loaded) return tl::unexpected(loaded.error());
    policy = std::move(*loaded);
    report.policy_revision = policy.revision;
    auto info = impl.info_of(identity, daemon_json);
    if (!info) return tl::unexpected(info.error());
    evidence = check_runtime(container, *info, policy);
    if (!add(evidence)) return evidence;
    runtime = evidence->substr(evidence->rfind(' ') + 1);

    auto started = engine::process_identity(container.pid);
    if (!started) return tl::unexpected(started.error());
    process = *started;
    evidence = frozen();
    if (!add(evidence)) return evidence;
    const std::string path = "/proc/" + std::to_string(container.pid) + "/ns/net";
    netns = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (netns.get() < 0) return fail_errno("network namespace of the container", path);
    evidence = check_alone(container.pid, netns.get());
    if (!add(evidence)) return evidence;
    return all;
  }
  // 6
  Evidence clean_slate() {
    std::vector<std::string> cleaned;
    const host::Snapshot snapshot = impl.ports.snapshot();
    for (const EndpointRecord& endpoint : snapshot.endpoints) {
      const bool own = endpoint.id == endpoint_id;
      const bool same_name = endpoint.release && endpoint.release->container_name == container.name;
      if (!own && !same_name) continue;
      if (const Status clean = impl.ports.clean(endpoint.id); !clean) {
        return tl::unexpected(clean.error());
      }
      cleaned.push_back(port_name(endpoint.id).str());
    }
    std::string list;
    for (const auto& name : cleaned) list += (list.empty() ? "" : ", ") + name;
    return "nothing left on " + list;
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
      return refuse("the container's process is not in the sandbox that the endpoint was joined to");
    }
    auto links = impl.ports.sandbox_links(netns.get());
    if (!links) return tl::unexpected(links.error());
    auto evidence = check_links(*links, port.endpoint, runtime == "runsc", link);
    if (!evidence) return evidence;
    auto differences = impl.ports.tie(endpoint_id, link, netns.get());
    if (!differences) return tl::unexpected(differences.error());
    if (!differences->empty()) {
      return refuse("the container's link and the port are not the two ends of one veth: " +
                    first_few(*differences));
    }
    const engine::Attachment& seen = container.attachments.front();
    const auto agree = [](const std::string& engine_says, const std::string& ours) {
      return engine_says == ours;
    };
    if (!agree(seen.mac, port.endpoint.mac.to_string()) ||
        !agree(seen.address4, port.endpoint.address4 ? port.endpoint.address4->to_string() : "") ||
        !agree(seen.address6, port.endpoint.address6 ? port.endpoint.address6->to_string() : "")) {
      return refuse("the engine says MAC " + seen.mac + ", addresses '" + seen.address4 + "' '" +
                    seen.address6 + "'; the endpoint has others");
    }
    return "port " + report.port + " and " + *evidence + " are one veth, in namespace " +
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
    auto ready = impl.ready(policy, report.notes);
    if (!ready) return tl::unexpected(ready.error());
    spec = std::move(ready->spec);
    std::string evidence = "flags, FDB entry and neighbours set; policy " + policy.name +
                           (ready->resolved ? " resolved now" : " resolved before");
    if (policy.resolvers.empty()) return evidence + "; no resolvers, resolver file left alone";
    resolver_text = policy::resolv_conf(policy);
    if (const Status written = write_in_place(container.resolv_conf_path, resolver_text); !written) {
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
      auto text = read_back(container.resolv_conf_path);
      if (!text) return tl::unexpected(text.error());
      if (*text != resolver_text) return refuse("the resolver file does not read back as written");
    }
    return "every field of every layer as meant";
  }
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
    auto paused = check_paused(*now);
    if (!paused) return paused;
    auto identity_now = engine::process_identity(container.pid);
    if (!identity_now || *identity_now != process) {
      return refuse("the container's process is another one now");
    }
    return frozen();
  }
  // runsc stops the guest's tasks inside the sandbox and leaves the cgroup running, so that the
  // kernel's freezer says nothing there; the engine's word is what there is.
  Evidence frozen() {
    if (runtime == "runsc") return "paused inside the sandbox";
    return check_frozen(container.pid);
  }
  // 11
  Evidence release() {
    auto same = still_the_same();
    if (!same) return same;
    Release record;
    record.container_id = container.id;
    record.container_name = container.name;
    record.process = process;
    record.policy = policy.name;
    record.released_at = utc_now();
    if (const Status released = impl.ports.release(endpoint_id, record, spec); !released) {
      return tl::unexpected(released.error());
    }
    return "same process, paused; released in one batch";
  }
  // 12
  Evidence read_back_release() {
    auto seen = impl.ports.inspect(endpoint_id);
    if (!seen) return tl::unexpected(seen.error());
    if (seen->state != PortState::released) {
      return refuse("the release does not read back: " +
                    (seen->differences.empty() ? std::string("the port is closed")
                                               : first_few(seen->differences)));
    }
    auto same = still_the_same();
    if (!same) return same;
    return "released exactly as meant; " + *same;
  }
  // 13
  Evidence engine_unchanged() {
    auto now = impl.engine.identify();
    if (!now) return tl::unexpected(now.error());
    auto hash = hash_of(impl.options.daemon_json);
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
      const bool close_again = step.outcome == StepOutcome::failed && step.number >= 11;
      report.steps.push_back(std::move(step));
      if (close_again) undo(released);
    }
    if (!failed) report.outcome = Outcome::released;
  }

  // Also when the batch of step 11 itself failed: its outcome may be unknown (ENOBUFS).
  void undo(bool released) {
    report.outcome = released ? Outcome::undone : Outcome::refused;
    Status closed = impl.ports.close(endpoint_id);
    if (closed) return;
    if (closed.error().code == ENOENT) return;  // the endpoint is gone, and its port with it
    closed = impl.ports.close(endpoint_id);
    if (closed) return;
    report.outcome = Outcome::undone;
    report.reason += "; AND THE PORT COULD NOT BE READ BACK CLOSED: " + closed.error().to_string() +
                     ": remove the container now";
  }
};

Pipeline::Pipeline(Options options, host::Ports& ports, engine::Api& engine)
    : impl_(std::make_unique<Impl>(std::move(options), ports, engine)) {}
Pipeline::~Pipeline() = default;

Report Pipeline::arm(const ArmRequest& request) {
  const auto start = Clock::now();
  Report report;
  report.operation = "arm";
  report.container = request.container;
  report.started_at = utc_now();
  // Serialised by the id, since a container has many names; an unknown one by what was asked.
  const auto found = impl_->engine.inspect(request.container);
  const auto lock = impl_->lock_of(found ? found->id : request.container);
  const std::lock_guard guard(*lock);
  Run run(*impl_, request, report);
  run.execute();
  report.milliseconds = since(start);
  impl_->write_audit(report);
  return report;
}

Report Pipeline::disarm(const std::string& container) {
  const auto start = Clock::now();
  Report report;
  report.operation = "disarm";
  report.container = container;
  report.started_at = utc_now();
  // The engine may be down and the container gone: what the releases say is enough.
  std::set<EndpointId> targets;
  const auto found = impl_->engine.inspect(container);
  const auto lock = impl_->lock_of(found ? found->id : container);
  const std::lock_guard guard(*lock);
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
    const bool by_id = container.size() >= 12 && release.container_id.rfind(container, 0) == 0;
    if (release.container_name == container || by_id ||
        (found && release.container_id == found->id)) {
      targets.insert(endpoint.id);
      report.policy = release.policy;
    }
  }
  std::vector<std::string> failures;
  for (const EndpointId& id : targets) {
    Step step{8, "port and default-deny", "close " + port_name(id).str(), StepOutcome::ok,
              "closed in all layers, read back; FDB entry and neighbours removed", 0};
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
  } else if (targets.empty() && !found) {
    report.outcome = Outcome::refused;
    report.reason = found.error().code == ENOENT
                        ? "there is no container '" + container + "', and no port released for it"
                        : "no port is released for '" + container + "', and the engine cannot say "
                          "more: " + found.error().to_string();
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
  Report report;
  report.operation = "check";
  report.container = container;
  report.started_at = utc_now();
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
      if (endpoint.release && (endpoint.release->container_name == container ||
                               endpoint.release->container_id == container)) {
        target = endpoint.id;
      }
    }
    report.notes.push_back("engine: " + found.error().to_string());
  }
  if (!target) {
    report.outcome = Outcome::refused;
    report.reason = found ? "'" + container + "' has no port of agentgate's (not running, or on "
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
  if (!seen || !network) {
    report.outcome = Outcome::inconsistent;
    report.reason = (!seen ? seen.error() : network.error()).to_string();
    return done();
  }
  for (const Difference& difference : seen->differences) {
    report.differences.push_back(text_of(difference));
  }
  for (const Difference& difference : *network) report.differences.push_back(text_of(difference));
  if (release && seen->state == PortState::closed) {
    report.differences.emplace_back("released by record, but closed in the kernel");
  }
  if (release && found) {
    // The premises of the release, as far as they can change afterwards.
    const auto premise = [&](const Evidence& evidence) {
      if (!evidence) report.differences.push_back("premise: " + evidence.error().text);
    };
    premise(check_restart_policy(*found));
    premise(check_networks(*found));
    const auto process = engine::process_identity(release->process.pid);
    if (found->id != release->container_id || !process || *process != release->process) {
      report.differences.emplace_back("premise: released for another process than runs now");
    }
    const std::string path = "/proc/" + std::to_string(release->process.pid) + "/ns/net";
    const Fd netns(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (netns.get() >= 0) premise(check_alone(release->process.pid, netns.get()));
  }
  if (release) {
    const auto loaded = policy::load(impl_->options.policy_directory, release->policy);
    const auto resolution = impl_->ports.resolution(release->policy);
    if (!loaded) {
      report.notes.push_back("policy file: " + loaded.error().to_string());
    } else {
      report.policy_revision = loaded->revision;
      if (resolution &&
          policy::needs_refresh(*loaded, *resolution, std::chrono::system_clock::now())) {
        report.notes.push_back("names of policy " + release->policy +
                               " are older than its refresh time; run: agentgate refresh");
      }
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
    const auto failed = [&](const std::string& text) {
      refreshed.error = text + "; what was released stays as it is";
    };
    const auto work = [&] {
      const auto loaded = policy::load(impl_->options.policy_directory, name);
      if (!loaded) return failed(loaded.error().to_string());
      refreshed.revision = loaded->revision;
      auto host = impl_->ports.host_addresses();
      if (!host) return failed(host.error().to_string());
      const auto conflicts = policy::conflicts_with_host(*loaded, *host);
      if (!conflicts.empty()) return failed(conflicts.front());
      const auto known = impl_->ports.resolution(name);
      if (!known) return failed(known.error().to_string());
      policy::Resolver resolver({impl_->options.resolvers, std::chrono::milliseconds(5000)});
      const auto now = std::chrono::system_clock::now();
      const policy::Resolution merged =
          policy::merge(*loaded, *known, resolver.resolve(names_of(*loaded)), now);
      const policy::Compiled compiled = policy::compile(*loaded, merged, *host);
      for (const auto& [label, resolved] : merged.names) {
        const auto before = known->names.find(label);
        for (const auto& address : resolved.addresses) {
          const bool was = before != known->names.end() &&
                           std::any_of(before->second.addresses.begin(),
                                       before->second.addresses.end(), [&](const auto& other) {
                                         return other.address == address.address;
                                       });
          if (!was) refreshed.added.push_back(label + " " + address.address.to_string());
          if (address.last_seen < now - std::chrono::seconds(60) || !resolved.error.empty()) {
            refreshed.kept.push_back(label + " " + address.address.to_string());
          }
        }
      }
      for (const auto& [label, resolved] : known->names) {
        const auto after = merged.names.find(label);
        for (const auto& address : resolved.addresses) {
          const bool is = after != merged.names.end() &&
                          std::any_of(after->second.addresses.begin(),
                                      after->second.addresses.end(), [&](const auto& other) {
                                        return other.address == address.address;
                                      });
          if (!is) refreshed.removed.push_back(label + " " + address.address.to_string());
        }
      }
      if (const Status updated = impl_->ports.update_policy(compiled.spec); !updated) {
        return failed(updated.error().to_string());
      }
      if (const Status saved = impl_->ports.save_resolution(name, merged); !saved) {
        return failed(saved.error().to_string());
      }
      refreshed.ok = compiled.unresolved.empty();
      for (const auto& name_error : compiled.unresolved) {
        refreshed.error += (refreshed.error.empty() ? "" : "; ") + name_error;
      }
    };
    work();
    out.push_back(std::move(refreshed));
  }
  return out;
}

host::Snapshot Pipeline::status() { return impl_->ports.snapshot(); }

std::vector<Finding> Pipeline::doctor() {
  return examine(impl_->options, impl_->ports, impl_->engine);
}

std::optional<netdriver::PolicySpec> compile_from_disk(
    const std::filesystem::path& policy_directory, const std::string& name,
    const policy::Resolution& resolution, const std::vector<IpAddress>& host) {
  const auto loaded = policy::load(policy_directory, name);
  if (!loaded) return std::nullopt;
  return policy::compile(*loaded, resolution, host).spec;
}

}  // namespace agentgate::arm

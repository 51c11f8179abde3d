// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/host/host.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "netdriver/monitor.h"
#include "netdriver/unique_fd.h"
#include "plugin/failpoint.h"
#include "plugin/host/firewall.h"
#include "plugin/store/store.h"

namespace agentgate::host {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxIncidents = 100;
constexpr auto kSuspectAge = std::chrono::seconds(2);
constexpr auto kHostAddressesEvery = std::chrono::seconds(5);
constexpr std::size_t kIdDigits = 64;  // of an id of Docker's
constexpr int kBetweenLooks = 10;      // milliseconds
constexpr auto kFirstPause = std::chrono::seconds(1);
constexpr auto kLongestPause = std::chrono::seconds(8);
constexpr std::size_t kNamed = 5;  // differences that one incident spells out
constexpr auto kSandboxesEvery = std::chrono::seconds(5);
constexpr auto kFirewallEvery = std::chrono::seconds(10);
constexpr auto kFirewallPause = std::chrono::milliseconds(250);

template <class Address>
bool same(const std::optional<Address>& a, const std::optional<Address>& b) {
  return a && b && *a == *b;
}

}  // namespace

struct Host::Impl {
  explicit Impl(Options o) : options(std::move(o)) {}

  Options options;

  // -- the owner thread and its queue ------------------------------------------------------------
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
  std::thread thread;
  std::thread firewall_thread;
  std::condition_variable firewall_wake;
  bool firewall_wanted = true;
  FirewallState firewall;  // guarded by mutex
  bool firewall_done = false;
  // What the kernel told the guard's thread and the owner thread has not looked at yet.
  netdriver::Notices notices;  // guarded by mutex
  bool guard_queued = false;   // guarded by mutex
  netdriver::UniqueFd guard_wake;
  std::thread guard_thread;

  // -- only the owner thread touches these -------------------------------------------------------
  std::unique_ptr<store::Store> store;
  std::unique_ptr<netdriver::Gate> gate;
  std::map<NetworkId, NetworkRecord> networks;
  std::map<EndpointId, EndpointRecord> endpoints;
  std::map<EndpointId, Clock::time_point> unjoined;   // since when
  std::set<EndpointId> unsaved;                       // whose file says something older
  std::map<EndpointId, Clock::time_point> abandoned;  // since when its sandbox is not there
  std::map<std::string, PolicyRecord> policies;       // that ports are released to
  std::map<std::string, policy::Resolution> resolutions;
  std::vector<std::string> incidents;
  GuardCounters counters;
  // After a repair that left something the next one waits, twice as long each time.
  std::chrono::seconds repair_pause{0};
  std::optional<Clock::time_point> repair_again;
  std::string left_before;  // by the last repair
  bool ready = false;
  std::string failure;
  Clock::time_point host_addresses_at{};
  Clock::time_point sandboxes_at{};

  // Runs `work` on the owner thread and waits for it: `work` may refer to the caller's variables.
  // Work that has not begun when the caller's patience ends is called off; work that has begun is
  // waited for, since every kernel request ends by itself (10 s).
  template <class T>
  T call(const std::string& what, std::function<T()> work) {
    struct Task {
      std::function<T()> work;
      std::promise<T> promise;
      enum { queued, running, called_off } state = queued;  // guarded by mutex
    };
    auto task = std::make_shared<Task>();
    task->work = std::move(work);
    std::future<T> future = task->promise.get_future();
    {
      const std::lock_guard lock(mutex);
      if (stopping) return fail(what, "the daemon is stopping", ESHUTDOWN);
      queue.emplace_back([this, task] {
        {
          const std::lock_guard inner(mutex);
          if (task->state == Task::called_off) return;
          task->state = Task::running;
        }
        task->promise.set_value(task->work());
      });
    }
    wake.notify_one();
    if (future.wait_for(options.patience) != std::future_status::ready) {
      const std::lock_guard lock(mutex);
      if (task->state == Task::queued) {
        task->state = Task::called_off;
        return fail(what, "the owner thread is busy; try again", ETIMEDOUT);
      }
    }
    return future.get();
  }
  template <class T>
  T when_ready(const std::string& what, std::function<T()> work) {
    return call<T>(what, [this, what, work = std::move(work)]() -> T {
      if (!ready) return fail(what, "agentgate is not ready: " + failure, EAGAIN);
      return work();
    });
  }

  void incident(const std::string& text) {
    spdlog::warn("{}", text);
    incidents.push_back(utc_now() + " " + text);
    if (incidents.size() > kMaxIncidents) incidents.erase(incidents.begin());
  }

  void run() {
    Status started = start();
    if (started && options.guard) started = start_guard();
    if (started) {
      ready = true;
      spdlog::info("ready: {} networks, {} endpoints", networks.size(), endpoints.size());
    } else {
      failure = started.error().to_string();
      spdlog::error("start failed: {}", failure);
    }
    std::unique_lock lock(mutex);
    while (!stopping) {
      wake.wait_for(lock, std::chrono::seconds(1), [&] { return stopping || !queue.empty(); });
      while (!queue.empty() && !stopping) {
        const auto task = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        task();
        lock.lock();
      }
      if (stopping || !ready) continue;
      lock.unlock();
      housekeeping();
      lock.lock();
    }
    // Whoever still waits is answered.
    while (!queue.empty()) {
      const auto task = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  Status start() {
    auto opened = store::Store::open(options.state_directory);
    if (!opened) return tl::unexpected(opened.error());
    store = std::move(*opened);
    auto contents = store->load();
    if (!contents) return tl::unexpected(contents.error());
    for (const std::string& damaged : contents->damaged) incident(damaged);
    auto gated = netdriver::Gate::open(options.ownership);
    if (!gated) return tl::unexpected(gated.error());
    gate = std::move(*gated);
    networks = std::move(contents->networks);
    policies = std::move(contents->released);
    for (auto& [policy, json] : contents->resolutions) {
      auto resolution = policy::resolution_from_json(json);
      if (resolution) {
        resolutions[policy] = std::move(*resolution);
      } else {
        incident("resolution of policy " + policy + ": " + resolution.error().to_string());
      }
    }
    std::vector<EndpointId> gone;
    for (auto& [id, endpoint] : contents->endpoints) {
      if (networks.count(endpoint.network) == 0) {
        incident("endpoint " + id.str() + " is on a network that is not known; removed");
        gone.push_back(id);
      } else if (endpoint.sandbox_key.empty()) {
        // Its creation was under way when the daemon died. Docker was told nothing, or tells us
        // nothing more; a Join that still comes is refused, and the container does not start.
        incident("endpoint " + id.str() + " was never joined; removed");
        gone.push_back(id);
      } else {
        endpoints[id] = std::move(endpoint);
      }
    }
    for (const EndpointId& id : gone) {
      if (const Status removed = store->remove(id); !removed) return removed;
    }
    return restore();
  }

  // -- the guard ---------------------------------------------------------------------------------
  // Its thread only listens; what it hears is looked at on the owner thread, between two requests,
  // so that it is compared with records that are whole.
  Status start_guard() {
    auto monitor = netdriver::Monitor::open(gate->nft_portid());
    if (!monitor) return tl::unexpected(monitor.error());
    guard_wake = netdriver::UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!guard_wake.valid()) return fail_errno("start the guard");
    guard_thread = std::thread([this, listener = std::move(*monitor)] {
      for (;;) {
        netdriver::Notices heard = listener->wait(guard_wake.get());
        std::unique_lock lock(mutex);
        if (stopping) return;
        if (heard.empty()) continue;
        notices.merge(std::move(heard));
        if (guard_queued) continue;
        guard_queued = true;
        queue.emplace_back([this] { look(); });
        wake.notify_one();
        // Whoever changes things in a loop gets one look for many of them.
        lock.unlock();
        pollfd stop{guard_wake.get(), POLLIN, 0};
        (void)::poll(&stop, 1, kBetweenLooks);
      }
    });
    // What happened between restore() and now was not heard.
    queue_full_look();
    return {};
  }
  void queue_full_look() {
    const std::lock_guard lock(mutex);
    notices.lost = true;
    if (guard_queued) return;
    guard_queued = true;
    queue.emplace_back([this] { look(); });
  }

  // The record whose link has that name: links carry the first digits of their id, and ids are in
  // order, so this costs the same with any number of them.
  template <class Records>
  static auto with_link(const Records& records, const char* prefix, const InterfaceName& name,
                        InterfaceName (*link_of)(const typename Records::key_type&)) {
    const std::string& text = name.str();
    if (text.rfind(prefix, 0) != 0) return records.end();
    std::string id = text.substr(std::char_traits<char>::length(prefix));
    id.resize(kIdDigits, '0');
    const auto least = Records::key_type::parse(id);
    if (!least) return records.end();
    const auto at = records.lower_bound(*least);
    return at != records.end() && link_of(at->first) == name ? at : records.end();
  }

  // Whether what was heard leaves something that is not as meant.
  Result<bool> suspicious(const netdriver::Notices& heard) {
    std::set<EndpointId> suspects;
    std::set<NetworkId> bridges;
    for (const InterfaceName& name : heard.links) {
      const auto network = with_link(networks, netdriver::kBridgePrefix, name, &bridge_name);
      const auto endpoint = with_link(endpoints, netdriver::kPortPrefix, name, &port_name);
      if (network != networks.end()) bridges.insert(network->first);
      if (endpoint != endpoints.end()) suspects.insert(endpoint->first);
      const bool known = network != networks.end() || endpoint != endpoints.end();
      if (known || heard.gone.count(name) != 0) continue;
      const auto there = gate->has_link(name);
      if (!there) return tl::unexpected(there.error());
      if (*there) return true;
    }
    for (const auto& [name, mac] : heard.fdb) {
      const auto endpoint = with_link(endpoints, netdriver::kPortPrefix, name, &port_name);
      if (endpoint == endpoints.end()) continue;
      if (endpoint->second.mac != mac) return true;
      suspects.insert(endpoint->first);
    }
    for (const auto& [bridge, address] : heard.neighbours) {
      for (const auto& [id, endpoint] : endpoints) {
        if ((endpoint.address4 && IpAddress(*endpoint.address4) == address) ||
            (endpoint.address6 && IpAddress(*endpoint.address6) == address)) {
          suspects.insert(id);
        }
      }
    }
    for (const NetworkId& id : bridges) {
      const auto found = gate->inspect_bridge(networks.at(id).spec());
      if (!found) return tl::unexpected(found.error());
      if (!found->empty()) return true;
    }
    for (const EndpointId& id : suspects) {
      const auto found = gate->inspect_link(port_spec(endpoints.at(id)));
      if (!found) return tl::unexpected(found.error());
      if (!found->empty()) return true;
    }
    return false;
  }

  void look() {
    netdriver::Notices heard;
    {
      const std::lock_guard lock(mutex);
      std::swap(heard, notices);
      guard_queued = false;
      if (heard.ip_tables || heard.lost) {
        firewall_wanted = true;
        firewall_wake.notify_all();
      }
    }
    if (!ready) return;
    ++counters.looks;
    if (heard.lost) ++counters.lost;
    if (heard.addresses || heard.lost) {
      if (const Status status = refresh_host_addresses(); !status) {
        incident(status.error().to_string());
      }
    }
    bool all = heard.lost || heard.tables;
    if (!all) {
      const auto suspect = suspicious(heard);
      if (!suspect) incident("guard: " + suspect.error().to_string());
      all = !suspect || *suspect;
    }
    if (all && !repair_again) repair();
  }

  Result<netdriver::GateSpec> desired() {
    netdriver::GateSpec spec;
    for (const auto& [id, network] : networks) {
      auto one = network.spec();
      spec.networks[one.bridge] = one;
    }
    for (const auto& [id, endpoint] : endpoints) {
      auto one = port_spec(endpoint);
      if (one.policy && policies.count(*one.policy) != 0) {
        spec.policies[*one.policy] = policies.at(*one.policy).spec;
      }
      spec.ports[one.name] = one;
    }
    if (Status status = fill_host_addresses(spec); !status) return tl::unexpected(status.error());
    return spec;
  }

  void repair() {
    const auto start = Clock::now();
    const auto spec = desired();
    if (!spec) {
      incident("guard: " + spec.error().to_string());
      ++counters.failures;
      return pause_repairs();
    }
    auto seen = gate->survey(*spec);
    if (seen && seen->empty()) return;
    ++counters.repairs;
    Repair done;
    done.at = utc_now();
    // What cannot be seen is repaired too: it tries again, and closes what it cannot prove.
    if (seen) {
      done.found = std::move(seen->differences);
    } else {
      done.found.push_back({"survey", "", seen.error().to_string()});
    }
    std::string text = "changed by others:";
    for (std::size_t i = 0; i < done.found.size() && i < kNamed; ++i) {
      const auto& one = done.found[i];
      text += (i == 0 ? " " : "; ") + one.where + ": expected '" + one.expected + "', found '" +
              one.found + "'";
    }
    if (done.found.size() > kNamed) {
      text += "; and " + std::to_string(done.found.size() - kNamed) + " more";
    }
    const auto repaired = gate->repair(*spec);
    done.milliseconds = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    if (repaired) {
      settle(*repaired, done);
    } else {
      done.left.push_back({"repair", "", repaired.error().to_string()});
    }
    counters.closed += done.closed.size() + done.gone.size();
    if (done.left.empty()) {
      repair_pause = std::chrono::seconds(0);
      text += "; put back in " + std::to_string(done.milliseconds) + " ms";
    } else {
      ++counters.failures;
      pause_repairs();
      text += "; NOT put back: " + done.left.front().where + ": expected '" +
              done.left.front().expected + "', found '" + done.left.front().found + "'";
    }
    if (!done.closed.empty()) text += "; closed " + std::to_string(done.closed.size()) + " ports";
    if (!done.gone.empty()) text += "; " + std::to_string(done.gone.size()) + " ports have no link";
    // The same failure again, every few seconds, is news once.
    std::string left;
    for (const auto& one : done.left) left += one.where + one.expected + one.found;
    if (!left.empty() && left == left_before) return;
    left_before = left;
    incident(text);
    if (options.on_repair) options.on_repair(done);
  }

  void pause_repairs() {
    repair_pause = std::clamp(repair_pause * 2, kFirstPause, kLongestPause);
    repair_again = Clock::now() + repair_pause;
  }

  // The records to what the kernel could keep.
  void settle(const netdriver::Repaired& repaired, Repair& done) {
    done.left = repaired.left;
    for (auto at = endpoints.begin(); at != endpoints.end();) {
      const InterfaceName name = port_name(at->first);
      const auto among = [&](const std::vector<InterfaceName>& names) {
        return std::find(names.begin(), names.end(), name) != names.end();
      };
      if (among(repaired.closed)) {
        done.closed.push_back(at->first);
        if (const Status shut = gate->close_port(port_spec(at->second)); !shut) {
          incident(shut.error().to_string());
        }
        if (at->second.release) {
          at->second.release.reset();
          if (const Status saved = save(at->second); !saved) {
            incident(saved.error().to_string());
          }
        }
      }
      if (!among(repaired.gone)) {
        ++at;
        continue;
      }
      done.gone.push_back(at->first);
      if (const Status gone = gate->delete_port(port_spec(at->second)); !gone) {
        incident(gone.error().to_string());
      }
      if (const Status gone = store->remove(at->first); !gone) incident(gone.error().to_string());
      unjoined.erase(at->first);
      abandoned.erase(at->first);
      at = endpoints.erase(at);
    }
    drop_unused_policies();
  }

  netdriver::PortSpec port_spec(const EndpointRecord& endpoint) const {
    return endpoint.spec(networks.at(endpoint.network));
  }

  // The kernel to what the records say; the records to what the kernel could keep.
  Status restore() {
    for (auto& [id, endpoint] : endpoints) {
      if (endpoint.release && !endpoint.release->committed && gate->tables_went_with_owner()) {
        // The daemon died before it knew that the kernel had it, and the kernel cannot say any
        // more.
        incident("port " + port_name(id).str() + ": its release was not finished; closed");
        endpoint.release.reset();
        if (const Status saved = store->save(endpoint); !saved) return saved;
      }
      if (endpoint.release && options.runs && !options.runs(endpoint.release->process)) {
        incident("port " + port_name(id).str() +
                 ": the process it was released for is gone; closed");
        endpoint.release.reset();
        if (const Status saved = store->save(endpoint); !saved) return saved;
      }
    }
    const auto spec = desired();
    if (!spec) return tl::unexpected(spec.error());
    const auto restored = gate->restore(*spec);
    if (!restored) return tl::unexpected(restored.error());
    // A lost state directory, or an older daemon's: who uses them has to know where they went.
    for (const InterfaceName& name : restored->removed) {
      incident("link " + name.str() + " is ours, and " + options.state_directory.string() +
               " does not know it; removed");
    }
    for (const InterfaceName& name : restored->closed) {
      for (auto at = endpoints.begin(); at != endpoints.end(); ++at) {
        if (port_name(at->first) != name) continue;
        auto report = gate->inspect_port(networks.at(at->second.network).spec(),
                                         closed(port_spec(at->second)), nullptr);
        const bool link_gone =
            report && std::any_of(report->differences.begin(), report->differences.end(),
                                  [](const auto& d) { return d.where.rfind("link ", 0) == 0; });
        if (link_gone) {
          incident("port " + name.str() + " has no link any more; its endpoint is removed");
          if (const Status removed = store->remove(at->first); !removed) return removed;
          endpoints.erase(at);
        } else {
          incident("port " + name.str() + " was not as it was released; closed");
          at->second.release.reset();
          if (const Status saved = store->save(at->second); !saved) return saved;
        }
        break;
      }
    }
    drop_unused_policies();
    return {};
  }

  static netdriver::PortSpec closed(netdriver::PortSpec port) {
    port.policy.reset();
    return port;
  }

  Status fill_host_addresses(netdriver::GateSpec& spec) {
    auto addresses = gate->host_addresses();
    if (!addresses) return tl::unexpected(addresses.error());
    for (const IpAddress& ip : *addresses) {
      if (ip.is_v4()) {
        spec.host4.push_back({ip.v4(), ip.v4()});
      } else {
        spec.host6.push_back({ip.v6(), ip.v6()});
      }
    }
    spec.host4 = merge(std::move(spec.host4));
    spec.host6 = merge(std::move(spec.host6));
    host_addresses_at = Clock::now();
    return {};
  }

  Status refresh_host_addresses() {
    netdriver::GateSpec now;
    if (const Status status = fill_host_addresses(now); !status) return status;
    return gate->set_host_addresses(now.host4, now.host6);
  }

  // The engine removes the sandbox's file with the sandbox. An endpoint without one has nobody in
  // it: its container is gone, and the engine's Leave and DeleteEndpoint never came (it retries a
  // request whose connection broke with an empty body, which cannot be served) or the engine
  // crashed. Up to Docker 27 the file comes a moment after Join, so this alone proves nothing
  // about an endpoint that is new.
  static bool has_sandbox(const EndpointRecord& endpoint) {
    struct stat status {};
    return endpoint.sandbox_key.empty() || ::stat(endpoint.sandbox_key.c_str(), &status) == 0;
  }

  void collect(const EndpointId& id, const char* why) {
    incident("endpoint " + id.str() + " " + why + "; removed");
    if (const Status gone = delete_endpoint(id); !gone) incident(gone.error().to_string());
  }

  void housekeeping() {
    const auto now = Clock::now();
    if (repair_again && now >= *repair_again) {
      repair_again.reset();
      repair();
    }
    for (const EndpointId& id : std::set<EndpointId>(unsaved)) {
      const auto known = endpoints.find(id);
      if (known == endpoints.end() || save(known->second)) unsaved.erase(id);
    }
    std::vector<EndpointId> orphans;
    for (const auto& [id, since] : unjoined) {
      if (now - since > options.orphan_age) orphans.push_back(id);
    }
    for (const EndpointId& id : orphans) collect(id, "was never joined");
    if (now - sandboxes_at > kSandboxesEvery) {
      sandboxes_at = now;
      orphans.clear();
      for (const auto& [id, endpoint] : endpoints) {
        if (has_sandbox(endpoint)) {
          abandoned.erase(id);
        } else if (now - abandoned.try_emplace(id, now).first->second > options.orphan_age) {
          orphans.push_back(id);
        }
      }
      for (const EndpointId& id : orphans) collect(id, "has no sandbox any more");
    }
    if (now - host_addresses_at > kHostAddressesEvery) {
      if (const Status status = refresh_host_addresses(); !status) {
        incident(status.error().to_string());
      }
    }
  }

  void run_firewall() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      firewall_wanted = false;
      lock.unlock();
      FirewallState state = ensure_docker_user();
      lock.lock();
      for (const auto& problem : state.problems) spdlog::warn("{}", problem);
      firewall = std::move(state);
      firewall_done = true;
      firewall_wake.notify_all();
      // Somebody who changes those rules all the time does not keep us running iptables.
      firewall_wake.wait_for(lock, kFirewallPause, [&] { return stopping; });
      firewall_wake.wait_for(lock, kFirewallEvery, [&] { return stopping || firewall_wanted; });
    }
  }

  static bool overlap(const NetworkRecord& a, const NetworkRecord& b) {
    return (a.gateway4 && b.gateway4 && a.gateway4->prefix().overlaps(b.gateway4->prefix())) ||
           (a.gateway6 && b.gateway6 && a.gateway6->prefix().overlaps(b.gateway6->prefix()));
  }

  // -- the work, on the owner thread -------------------------------------------------------------
  Status create_network(const NetworkRecord& network) {
    const std::string operation = "create network " + network.id.str();
    const auto known = networks.find(network.id);
    if (known != networks.end() && known->second == network) return {};
    // The engine hands out subnets and gives none twice. One that it gives anew was another's that
    // it forgot: its creation was interrupted, and nothing would ever remove it. A network of a
    // swarm is forgotten with every crash, and comes again under its id, from a configuration of
    // this host that may be another by now.
    std::vector<NetworkId> forgotten;
    for (const auto& [id, other] : networks) {
      const bool same_id = id == network.id;
      const auto user =
          std::find_if(endpoints.begin(), endpoints.end(), [&id = id, same_id](const auto& entry) {
            return entry.second.network == id && (!same_id || has_sandbox(entry.second));
          });
      if (same_id && user != endpoints.end()) {
        return fail(operation,
                    "it exists with other options, and endpoint " + user->first.str() +
                        " is on it; remove what is on it first",
                    EEXIST);
      }
      if (user == endpoints.end() && (same_id || overlap(network, other))) forgotten.push_back(id);
    }
    for (const auto& [id, other] : networks) {
      if (std::find(forgotten.begin(), forgotten.end(), id) != forgotten.end()) continue;
      if (overlap(network, other)) {
        return fail(operation,
                    "its subnet overlaps that of network " + id.str().substr(0, 12) +
                        "; choose another with --subnet",
                    EADDRINUSE);
      }
      if (bridge_name(id) == bridge_name(network.id)) {
        return fail(operation, "its bridge name collides with network " + id.str() + "; try again",
                    EEXIST);
      }
    }
    // Only now, when nothing else refuses it.
    for (const NetworkId& id : forgotten) {
      for (const auto& [endpoint_id, endpoint] : std::map(endpoints)) {
        if (endpoint.network == id) collect(endpoint_id, "has no sandbox, and its network is new");
      }
      incident("network " + id.str() + " has no endpoint, and its " +
               (id == network.id ? "id" : "subnet") + " is given anew; removed");
      if (Status gone = delete_network(id); !gone) return gone;
    }
    // Disk before kernel: what the kernel has is always known after a crash.
    if (const Status saved = store->save(network); !saved) return saved;
    failpoint("host.create_network.saved");
    if (Status made = gate->create_network(network.spec()); !made) {
      if (const Status removed = store->remove(network.id); !removed) {
        incident(removed.error().to_string());
      }
      return made;
    }
    networks[network.id] = network;
    return refresh_host_addresses();
  }

  Status delete_network(const NetworkId& id) {
    if (networks.count(id) == 0) return {};
    for (const auto& [endpoint_id, endpoint] : endpoints) {
      if (endpoint.network == id) {
        return fail("delete network " + id.str(), "endpoint " + endpoint_id.str() + " is on it",
                    EBUSY);
      }
    }
    Status kernel = gate->delete_network(bridge_name(id));
    const Status disk = store->remove(id);
    networks.erase(id);
    if (!kernel) return kernel;
    if (!disk) return disk;
    return refresh_host_addresses();
  }

  Status create_endpoint(const EndpointRecord& endpoint) {
    const std::string operation = "create endpoint " + endpoint.id.str();
    const auto network = networks.find(endpoint.network);
    if (network == networks.end()) {
      return fail(
          operation,
          "network " + endpoint.network.str() +
              " is not known here (its state is lost, or it is another daemon's); remove it "
              "(docker network rm) and create it again",
          ENOENT);
    }
    // The engine hands out addresses. Where it gives one of an endpoint whose sandbox is gone to
    // another, the old endpoint is one that it forgot.
    std::vector<EndpointId> forgotten;
    for (const auto& [id, other] : endpoints) {
      if (id != endpoint.id &&
          (same(other.address4, endpoint.address4) || same(other.address6, endpoint.address6)) &&
          !has_sandbox(other)) {
        forgotten.push_back(id);
      }
    }
    for (const EndpointId& id : forgotten)
      collect(id, "has no sandbox, and its address is given anew");
    for (const auto& [id, other] : endpoints) {
      if (id == endpoint.id) {
        if (other.network == endpoint.network && other.address4 == endpoint.address4 &&
            other.address6 == endpoint.address6 && other.mac == endpoint.mac &&
            other.policy == endpoint.policy) {
          return {};
        }
        return fail(operation, "it exists with other addresses", EEXIST);
      }
      if (same(other.address4, endpoint.address4) || same(other.address6, endpoint.address6) ||
          (other.network == endpoint.network && other.mac == endpoint.mac)) {
        return fail(operation, "its address or MAC is in use by endpoint " + id.str(), EADDRINUSE);
      }
      if (port_name(id) == port_name(endpoint.id)) {
        return fail(operation, "its link name collides with endpoint " + id.str() + "; try again",
                    EEXIST);
      }
    }
    if (const Status saved = store->save(endpoint); !saved) return saved;
    failpoint("host.create_endpoint.saved");
    if (Status made = gate->create_port(endpoint.spec(network->second)); !made) {
      if (const Status removed = store->remove(endpoint.id); !removed) {
        incident(removed.error().to_string());
      }
      return made;
    }
    failpoint("host.create_endpoint.made");
    endpoints[endpoint.id] = endpoint;
    if (endpoint.sandbox_key.empty()) unjoined[endpoint.id] = Clock::now();
    return {};
  }

  Status delete_endpoint(const EndpointId& id) {
    const auto found = endpoints.find(id);
    if (found == endpoints.end()) return {};
    Status kernel = gate->delete_port(port_spec(found->second));
    failpoint("host.delete_endpoint.unmade");
    if (!kernel) return kernel;
    if (Status disk = store->remove(id); !disk) return disk;
    const EndpointId key = id;  // `id` may refer to what goes now
    endpoints.erase(found);
    unjoined.erase(key);
    abandoned.erase(key);
    drop_unused_policies();
    return {};
  }

  Result<Port> join(const EndpointId& id, const std::string& key) {
    const auto found = endpoints.find(id);
    if (found == endpoints.end()) {
      return fail("join " + id.str(), "the endpoint is not known; start the container again",
                  ENOENT);
    }
    EndpointRecord changed = found->second;
    changed.sandbox_key = key;
    if (const Status saved = store->save(changed); !saved) return tl::unexpected(saved.error());
    found->second = changed;
    unjoined.erase(id);
    return Port{changed, networks.at(changed.network)};
  }

  // Disk first, since before Linux 6.9 the next start has only the disk's word; but the kernel in
  // any case. What could not be written is written later, and until then its controls are gone, so
  // that a start finds it different from what the file says.
  Status close(EndpointRecord& endpoint) {
    Status saved;
    if (endpoint.release || unsaved.count(endpoint.id) != 0) {
      endpoint.release.reset();
      saved = save(endpoint);
    }
    if (Status closed_now = gate->close_port(port_spec(endpoint)); !closed_now) return closed_now;
    failpoint("host.close.closed");
    if (!saved) {
      if (const Status bare = gate->unprepare_port(port_spec(endpoint)); !bare) {
        incident(bare.error().to_string());
      }
      endpoint.prepared = false;
      return saved;
    }
    drop_unused_policies();
    return {};
  }

  // A file that could not be written is tried again by the housekeeping.
  Status save(const EndpointRecord& endpoint) {
    Status saved = store->save(endpoint);
    if (saved) {
      unsaved.erase(endpoint.id);
    } else {
      unsaved.insert(endpoint.id);
    }
    return saved;
  }

  void drop_unused_policies() {
    for (auto at = policies.begin(); at != policies.end();) {
      const bool used = std::any_of(endpoints.begin(), endpoints.end(), [&](const auto& entry) {
        return entry.second.release && entry.second.release->policy == at->first;
      });
      if (used) {
        ++at;
        continue;
      }
      if (const Status gone = gate->delete_policy(at->first); !gone) {
        incident(gone.error().to_string());
      }
      if (const Status gone = store->remove_released(at->first); !gone) {
        incident(gone.error().to_string());
      }
      at = policies.erase(at);
    }
  }

  Status clean(EndpointRecord& endpoint) {
    if (Status closed_now = close(endpoint); !closed_now) return closed_now;
    if (Status undone = gate->unprepare_port(port_spec(endpoint)); !undone) return undone;
    if (!endpoint.prepared) return {};
    endpoint.prepared = false;
    return save(endpoint);
  }

  Status prepare(EndpointRecord& endpoint) {
    if (const Status status = refresh_host_addresses(); !status) return status;
    EndpointRecord changed = endpoint;
    changed.prepared = true;
    if (Status made = gate->prepare_port(port_spec(changed)); !made) return made;
    if (!endpoint.prepared) {
      if (Status saved = store->save(changed); !saved) return saved;
    }
    endpoint = changed;
    return {};
  }

  Status release(EndpointRecord& endpoint, const Release& release, const PolicyRecord& policy) {
    const std::string operation = "release endpoint " + endpoint.id.str();
    if (!endpoint.prepared) return fail(operation, "its controls are not in place", EINVAL);
    if (release.policy != policy.spec.name) {
      return fail(operation, "release and policy do not belong together", EINVAL);
    }
    EndpointRecord changed = endpoint;
    changed.release = release;
    changed.release->committed = false;
    if (Status saved = store->save(policy); !saved) return saved;
    if (Status saved = store->save(changed); !saved) {
      restore_policy_file(policy.spec.name);
      return saved;
    }
    failpoint("host.release.saved");
    Status released = gate->release_port(port_spec(changed), policy.spec);
    failpoint("host.release.released");
    if (!released) {
      // The files are put back; the batch was refused, so the port is as it was: closed.
      if (const Status saved = store->save(endpoint); !saved) incident(saved.error().to_string());
      restore_policy_file(policy.spec.name);
      return released;
    }
    changed.release->committed = true;
    endpoint = changed;
    policies[policy.spec.name] = policy;
    return save(endpoint);
  }

  // What is on disk of a policy shall be what the kernel has of it.
  void restore_policy_file(const std::string& name) {
    const auto known = policies.find(name);
    const Status done =
        known == policies.end() ? store->remove_released(name) : store->save(known->second);
    if (!done) incident(done.error().to_string());
  }

  Status update_policy(const PolicyRecord& policy) {
    const auto known = policies.find(policy.spec.name);
    if (known == policies.end() || known->second == policy) return {};
    if (Status saved = store->save(policy); !saved) return saved;
    if (Status updated = gate->update_policy(policy.spec); !updated) {
      restore_policy_file(policy.spec.name);
      return updated;
    }
    known->second = policy;
    return {};
  }

  template <class T>
  T with_endpoint(const std::string& what, const EndpointId& id,
                  const std::function<T(EndpointRecord&)>& work) {
    return when_ready<T>(what, [&, this]() -> T {
      const auto found = endpoints.find(id);
      if (found == endpoints.end()) {
        return fail(what + " " + id.str(), "the endpoint is not known", ENOENT);
      }
      return work(found->second);
    });
  }
};

Host::Host(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::unique_ptr<Host> Host::start(Options options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  Impl* raw = impl.get();
  impl->thread = std::thread([raw] { raw->run(); });
  if (raw->options.manage_firewall) {
    impl->firewall_thread = std::thread([raw] { raw->run_firewall(); });
  }
  return std::unique_ptr<Host>(new Host(std::move(impl)));
}

Host::~Host() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  impl_->firewall_wake.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
  if (impl_->guard_thread.joinable()) {
    const std::uint64_t one = 1;
    (void)!::write(impl_->guard_wake.get(), &one, sizeof one);
    impl_->guard_thread.join();
  }
  if (impl_->firewall_thread.joinable()) impl_->firewall_thread.join();
}

Status Host::create_network(const NetworkRecord& network) {
  return impl_->when_ready<Status>("create network",
                                   [&, record = network] { return impl_->create_network(record); });
}

Status Host::delete_network(const NetworkId& id) {
  return impl_->when_ready<Status>("delete network",
                                   [&, key = id] { return impl_->delete_network(key); });
}

Status Host::create_endpoint(const EndpointRecord& endpoint) {
  return impl_->when_ready<Status>(
      "create endpoint", [&, record = endpoint] { return impl_->create_endpoint(record); });
}

Status Host::delete_endpoint(const EndpointId& id) {
  return impl_->when_ready<Status>("delete endpoint",
                                   [&, key = id] { return impl_->delete_endpoint(key); });
}

Result<Port> Host::join(const EndpointId& id, const std::string& sandbox_key) {
  return impl_->when_ready<Result<Port>>(
      "join", [&, key = id, sandbox = sandbox_key] { return impl_->join(key, sandbox); });
}

Status Host::leave(const EndpointId& id) {
  return impl_->when_ready<Status>("leave", [&, key = id]() -> Status {
    const auto found = impl_->endpoints.find(key);
    return found == impl_->endpoints.end() ? Status() : impl_->close(found->second);
  });
}

void Host::suspect_orphans() {
  const std::lock_guard lock(impl_->mutex);
  impl_->queue.emplace_back([this] {
    // Others may be between creation and join right now; they have two seconds.
    const auto since = Clock::now() - impl_->options.orphan_age + kSuspectAge;
    for (auto& [id, time] : impl_->unjoined) time = std::min(time, since);
  });
  impl_->wake.notify_one();
}

void Host::engine_seen() {
  const std::lock_guard lock(impl_->mutex);
  impl_->firewall_wanted = true;
  impl_->firewall_wake.notify_all();
}

Result<Port> Host::find(const EndpointId& id) {
  return impl_->with_endpoint<Result<Port>>("find", id, [&](EndpointRecord& endpoint) {
    return Result<Port>(Port{endpoint, impl_->networks.at(endpoint.network)});
  });
}

Result<std::vector<NetworkRecord>> Host::networks() {
  return impl_->when_ready<Result<std::vector<NetworkRecord>>>("networks", [&] {
    std::vector<NetworkRecord> out;
    for (const auto& [id, network] : impl_->networks) out.push_back(network);
    return Result<std::vector<NetworkRecord>>(std::move(out));
  });
}

Status Host::close(const EndpointId& id) {
  return impl_->with_endpoint<Status>("close", id,
                                      [&](EndpointRecord& e) { return impl_->close(e); });
}

Status Host::clean(const EndpointId& id) {
  return impl_->with_endpoint<Status>("clean", id,
                                      [&](EndpointRecord& e) { return impl_->clean(e); });
}

Status Host::prepare(const EndpointId& id) {
  return impl_->with_endpoint<Status>("prepare", id,
                                      [&](EndpointRecord& e) { return impl_->prepare(e); });
}

Status Host::announce(const EndpointId& id) {
  return impl_->with_endpoint<Status>("announce", id, [&](EndpointRecord& e) {
    return impl_->gate->announce(impl_->port_spec(e));
  });
}

Status Host::release(const EndpointId& id, const Release& release, const PolicyRecord& policy) {
  return impl_->with_endpoint<Status>(
      "release", id, [&](EndpointRecord& e) { return impl_->release(e, release, policy); });
}

Result<netdriver::PortReport> Host::inspect(const EndpointId& id) {
  using Out = Result<netdriver::PortReport>;
  return impl_->with_endpoint<Out>("inspect", id, [&](EndpointRecord& endpoint) -> Out {
    const netdriver::PolicySpec* policy = nullptr;
    if (endpoint.release) {
      const auto known = impl_->policies.find(endpoint.release->policy);
      if (known == impl_->policies.end()) {
        return fail("inspect", "the policy of the release is not known", ENOENT);
      }
      policy = &known->second.spec;
    }
    return impl_->gate->inspect_port(impl_->networks.at(endpoint.network).spec(),
                                     impl_->port_spec(endpoint), policy);
  });
}

Result<std::vector<netdriver::Difference>> Host::foreign_entries(const EndpointId& id) {
  using Out = Result<std::vector<netdriver::Difference>>;
  return impl_->with_endpoint<Out>("inspect", id, [&](EndpointRecord& endpoint) -> Out {
    return impl_->gate->foreign_entries(impl_->port_spec(endpoint));
  });
}

Result<std::vector<netdriver::Difference>> Host::inspect_network(const NetworkId& id) {
  using Out = Result<std::vector<netdriver::Difference>>;
  std::vector<netdriver::Difference> firewall;
  if (impl_->options.manage_firewall) {
    std::unique_lock lock(impl_->mutex);
    impl_->firewall_wake.wait_for(lock, std::chrono::seconds(5),
                                  [&] { return impl_->firewall_done; });
    for (const auto& problem : impl_->firewall.problems) {
      firewall.push_back({"the engine's firewall", "our pair of rules in DOCKER-USER", problem});
    }
  }
  return impl_->when_ready<Out>("inspect network", [&, key = id]() -> Out {
    const auto found = impl_->networks.find(key);
    if (found == impl_->networks.end()) {
      return fail("inspect network " + key.str(), "the network is not known", ENOENT);
    }
    Out out = impl_->gate->inspect_network(found->second.spec());
    if (out) out->insert(out->end(), firewall.begin(), firewall.end());
    return out;
  });
}

Result<std::vector<netdriver::SandboxLink>> Host::sandbox_links(int netns_fd) {
  using Out = Result<std::vector<netdriver::SandboxLink>>;
  return impl_->when_ready<Out>("sandbox links",
                                [&] { return impl_->gate->sandbox_links(netns_fd); });
}

Result<std::vector<netdriver::Difference>> Host::tie(const EndpointId& id,
                                                     const netdriver::SandboxLink& link,
                                                     int netns_fd) {
  using Out = Result<std::vector<netdriver::Difference>>;
  return impl_->with_endpoint<Out>("tie", id, [&](EndpointRecord& endpoint) {
    return impl_->gate->tie(impl_->port_spec(endpoint), link, netns_fd);
  });
}

Result<std::vector<IpAddress>> Host::host_addresses() {
  using Out = Result<std::vector<IpAddress>>;
  return impl_->when_ready<Out>("host addresses", [&] { return impl_->gate->host_addresses(); });
}

Status Host::update_policy(const PolicyRecord& policy) {
  return impl_->when_ready<Status>("update policy", [&] { return impl_->update_policy(policy); });
}

Result<policy::Resolution> Host::resolution(const std::string& policy) {
  using Out = Result<policy::Resolution>;
  return impl_->when_ready<Out>("resolution", [&] { return Out(impl_->resolutions[policy]); });
}

Status Host::save_resolution(const std::string& policy, const policy::Resolution& resolution) {
  return impl_->when_ready<Status>("save resolution", [&]() -> Status {
    if (impl_->resolutions[policy] == resolution) return {};
    Status saved = impl_->store->save_resolution(policy, policy::to_json(resolution));
    if (saved) impl_->resolutions[policy] = resolution;
    return saved;
  });
}

Snapshot Host::snapshot() {
  auto result = impl_->call<Result<Snapshot>>("snapshot", [&]() -> Result<Snapshot> {
    Snapshot out;
    for (const auto& [id, network] : impl_->networks) out.networks.push_back(network);
    for (const auto& [id, endpoint] : impl_->endpoints) out.endpoints.push_back(endpoint);
    for (const auto& [name, policy] : impl_->policies) out.revisions[name] = policy.revision;
    if (impl_->gate) out.features = impl_->gate->features();
    out.ready = impl_->ready;
    out.failure = impl_->failure;
    out.guard = impl_->counters;
    out.incidents = impl_->incidents;
    return out;
  });
  if (result) return *result;
  Snapshot out;
  out.failure = result.error().to_string();
  return out;
}

}  // namespace agentgate::host

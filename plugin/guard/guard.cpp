// SPDX-License-Identifier: GPL-2.0-or-later
#include "plugin/guard/guard.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "plugin/model.h"

namespace agentgate::guard {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxIncidents = 100;

// One container that is to be judged.
struct Task {
  std::string event;  // that gave rise to it
  bool started = false;
  arm::Premises which = arm::Premises::all;
  std::chrono::milliseconds waited{0};  // before this attempt
  Clock::time_point due{};              // of the next one, among what is for later
};
const std::string kEverything;  // no container has an empty id

// The engine's words are for a log: one line, not too long.
std::string one_line(const std::string& text) {
  std::string out;
  for (const char c : text.substr(0, 200)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? '?' : c;
  }
  return out;
}

}  // namespace

struct Guard::Impl final : engine::EventSink {
  Impl(Options o, engine::Api& e, arm::Watched& w) : options(o), engine(e), watched(w) {}

  const Options options;
  engine::Api& engine;
  arm::Watched& watched;

  std::mutex mutex;
  std::condition_variable wake;  // of both threads
  bool stopping = false;
  arm::EngineGuardStatus status;
  bool told = false;                   // that it is not connected
  std::optional<std::string> all;      // everything is to be judged, and why
  std::map<std::string, Task> urgent;  // by container: something happened to it
  std::map<std::string, Task> rest;    // left of judging everything
  std::map<std::string, Task> later;   // could not be judged; kEverything stands for all of them
  std::thread reader, worker;

  // -- the reader -------------------------------------------------------------------------------
  void read() {
    auto delay = options.backoff_least;
    for (;;) {
      const auto began = Clock::now();
      const Status ended = engine.events(std::chrono::system_clock::now(), *this);
      std::unique_lock lock(mutex);
      if (stopping) return;
      const bool lasted = status.connected && Clock::now() - began >= options.backoff_most;
      if (lasted) delay = options.backoff_least;
      lost(ended ? "it ended" : ended.error().to_string());
      wake.wait_for(lock, delay, [&] { return stopping; });
      if (stopping) return;
      delay = std::min(delay * 2, options.backoff_most);
    }
  }

  void connected() override {
    const std::lock_guard lock(mutex);
    status.connected = true;
    status.since = utc_now();
    status.reason.clear();
    told = false;
    spdlog::info("engine guard: connected to the engine's events; all releases are judged");
    if (status.losses > 0) incident("engine guard: connected to the engine's events again");
    judge_all("connection to the engine's events");
    watched.guard_seen(status);
  }

  void event(const engine::Event& event) override {
    if (event.container.empty()) return;
    const std::string text = one_line(event.type + " " + event.action + " " + event.name);
    spdlog::debug("engine guard: {} ({})", text, one_line(event.container));
    const std::lock_guard lock(mutex);
    if (urgent.size() >= options.most_waiting) {
      urgent.clear();
      judge_all("more events than can be kept");
      return;
    }
    Task& task = urgent[event.container];
    task.event = text;
    task.which = arm::Premises::all;
    task.started = task.started || (event.type == "container" && event.action == "start");
    wake.notify_all();
  }

  // -- with the mutex held ----------------------------------------------------------------------
  void lost(const std::string& reason) {
    const std::string text = one_line(reason);
    if (status.connected || status.since.empty()) status.since = utc_now();
    if (std::exchange(status.connected, false)) {
      ++status.losses;
      incident("engine guard: the engine's event stream is lost (" + text +
               "); releases stay and are not watched until it is back");
    }
    status.reason = text;
    if (!std::exchange(told, true)) {
      spdlog::warn("engine guard: not connected to the engine's events: {}; trying on", text);
    }
    // The kernel can be asked without the engine.
    judge_all("loss of the engine's events");
    watched.guard_seen(status);
  }

  void judge_all(const char* why) {
    all = why;
    wake.notify_all();
  }

  void incident(const std::string& text) {
    status.incidents.push_back(utc_now() + " " + text);
    if (status.incidents.size() > kMaxIncidents) status.incidents.erase(status.incidents.begin());
  }

  void again(const std::string& container, Task task) {
    task.waited = std::clamp(task.waited * 2, options.retry_least, options.retry_most);
    task.due = Clock::now() + task.waited;
    if (later.size() >= options.most_waiting && later.count(container) == 0) {
      later.clear();
      later[kEverything] = std::move(task);
      return;
    }
    const auto [known, fresh] = later.try_emplace(container, task);
    if (fresh) return;
    known->second.started = known->second.started || task.started;
    known->second.which = arm::Premises::all;
  }

  void take_due() {
    const auto now = Clock::now();
    for (auto at = later.begin(); at != later.end();) {
      if (at->second.due > now) {
        ++at;
      } else if (at->first == kEverything) {
        all = at->second.event;
        at = later.erase(at);
      } else {
        const auto [known, fresh] = urgent.try_emplace(at->first, at->second);
        known->second.started = known->second.started || at->second.started;
        if (!fresh) known->second.which = arm::Premises::all;
        at = later.erase(at);
      }
    }
  }

  void note(const arm::Rechecked& done) {
    if (done.closed.empty()) return;
    for (const arm::Report& report : done.closed) {
      const std::string text = "engine guard: port " + report.port + " of " +
                               report.container_name + ": " + report.reason;
      switch (report.outcome) {
        case arm::Outcome::closed:  // what it was released for has ended by itself
          spdlog::info("{}", text);
          break;
        case arm::Outcome::undone:
          spdlog::warn("{}", text);
          incident(text);
          break;
        default:
          spdlog::critical("{}", text);
          incident(text);
          continue;
      }
      ++status.closed;
    }
    watched.guard_seen(status);
  }

  // -- the worker -------------------------------------------------------------------------------
  void work() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      take_due();
      if (all) {
        const std::string why = *std::exchange(all, std::nullopt);
        sweep(lock, why, status.connected);
      } else if (!urgent.empty()) {
        judge(lock, urgent.extract(urgent.begin()));
      } else if (!rest.empty()) {
        judge(lock, rest.extract(rest.begin()));
      } else if (later.empty()) {
        wake.wait(lock);
      } else {
        const auto next = std::min_element(
            later.begin(), later.end(),
            [](const auto& a, const auto& b) { return a.second.due < b.second.due; });
        const auto due = next->second.due;
        wake.wait_until(lock, due);
      }
    }
  }

  void judge(std::unique_lock<std::mutex>& lock, std::map<std::string, Task>::node_type node) {
    const std::string container = node.key();
    Task task = std::move(node.mapped());
    lock.unlock();
    const arm::Rechecked done = task.started
                                    ? watched.started(container, engine, task.event)
                                    : watched.recheck({container}, task.which, engine, task.event);
    lock.lock();
    note(done);
    if (!done.again.empty()) again(container, std::move(task));
  }

  void sweep(std::unique_lock<std::mutex>& lock, const std::string& why, bool with_engine) {
    lock.unlock();
    const auto releases = watched.released();
    arm::Rechecked done;
    if (releases && !releases->empty()) {
      done = watched.recheck(*releases, arm::Premises::kernel, engine, why);
    }
    lock.lock();
    note(done);
    if (!releases) {  // the state is being restored
      Task task;
      task.event = why;
      again(kEverything, std::move(task));
      return;
    }
    Task next;
    next.event = "a look at everything";
    next.due = Clock::now() + options.look_every;
    later[kEverything] = std::move(next);
    for (const std::string& container : done.again) {
      Task task;
      task.event = why;
      task.which = with_engine ? arm::Premises::all : arm::Premises::kernel;
      again(container, std::move(task));
    }
    rest.clear();
    if (!with_engine) return;
    for (const std::string& container : *releases) {
      Task task;
      task.event = why;
      task.which = arm::Premises::engine;
      rest.emplace(container, std::move(task));
    }
  }
};

Guard::Guard(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::unique_ptr<Guard> Guard::start(Options options, engine::Api& engine, arm::Watched& watched) {
  auto impl = std::make_unique<Impl>(options, engine, watched);
  Impl* raw = impl.get();
  raw->reader = std::thread([raw] { raw->read(); });
  raw->worker = std::thread([raw] { raw->work(); });
  return std::unique_ptr<Guard>(new Guard(std::move(impl)));
}

Guard::~Guard() { stop(); }

void Guard::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  impl_->engine.interrupt();
  if (impl_->reader.joinable()) impl_->reader.join();
  if (impl_->worker.joinable()) impl_->worker.join();
}

}  // namespace agentgate::guard
